"""The engine, as the episode driver and the node loop see it without importing vllm or torch."""

import itertools
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from common.rollouts import VersionRun

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Generation:
    """One call of the model: N sampled tokens."""

    tokens: list[int]  # [N] token ids; with finish_reason 'stop' the sampled end token is the last of them
    logprobs: list[float]  # [N] log-probabilities under the distribution really sampled from (temperature, top-p)
    # policy versions by start index into `tokens`; the first run starts at 0 (empty only if N = 0)
    version_runs: list[VersionRun]
    finish_reason: FinishReason  # an end token was sampled, max_tokens or the context is used up, or the engine gave up
    # [prompt + N - 1, MoE layers, experts per token] int16, the experts of every token. The last sampled token has
    # none, because it was not fed. None: experts are not recorded.
    routed_experts: np.ndarray | None = None


@dataclass(eq=False)
class Session:
    """The requests of one conversation: each continues an earlier one. The engine fills it."""

    number: int = field(default_factory=itertools.count().__next__)  # unique in this process
    first_prompt: int = 0  # tokens of its first prompt, which other conversations may have too
    label: str = ""  # the weights that sampled its first token; '' before


class Sampler(Protocol):
    """Tokens in, tokens out. Calls run concurrently; a cancelled call aborts its request in the engine."""

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        session: Session | None = None,
    ) -> Generation:
        """Continue `prompt_ids` by at most `max_tokens` tokens, also across flips; temperature 0 is greedy.

        `seed`: of the request's own draws; None: they are the engine's, different every time. `session`: with
        weights.kv_cache: keep_episode the request reads what earlier ones left in the KV cache, also over flips.

        Raises SlipstreamError when the engine is dead, ValueError when this request cannot be served.
        """
        ...


@dataclass
class EngineCounters:
    """Totals since the engine started, for reports."""

    tokens_generated: int = 0
    requests: int = 0
    prompt_tokens: int = 0  # prompts of finished requests; every turn of an episode counts its whole prompt
    cached_tokens: int = 0  # prompt tokens whose keys and values the prefix cache had
    # The counters below are counted only where rollout.concurrency is auto.
    kv_cache_usage: float = 0.0  # share in use at the last engine step
    running: int = 0  # requests that it computed and did not end
    waiting: int = 0  # requests that the engine had not let in then
    preemptions: int = 0  # requests that lost their KV cache to others and were admitted again
    tokens_recomputed: int = 0  # tokens of their prompts and answers that were computed again
    recompute_s: float = 0.0  # seconds that engine steps took longer than usual for it
    tokens_sampled: int = 0  # by the engine so far, also for requests that still run
