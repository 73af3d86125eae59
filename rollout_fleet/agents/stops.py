"""Stops that one request asks for: texts and tokens that end its answer. The engine knows only the job's end tokens.

The answer is sampled CHUNK tokens at a time and cut behind the token that completes a stop. Whether it ends there
follows from the tokens so far, so those that are kept are distributed as the policy has them. The rest of the last
chunk is thrown away.
"""

import random
from dataclasses import replace

import numpy as np

from common.rollouts import VersionRun
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Generation, Sampler, Session

CHUNK = 32  # tokens: at most so many are thrown away


class StopSampler:
    """A Sampler for one request; afterwards `text` is the answer before the stop, None if another end came first."""

    def __init__(self, sampler: Sampler, renderer: Renderer, texts: tuple[str, ...], tokens: frozenset[int]) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._texts = texts
        self._tokens = tokens
        self.text: str | None = None
        self.stop: str | None = None  # the text that ended it; None for a token

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        session: Session | None = None,
    ) -> Generation:
        """As Sampler.generate; an answer that a stop ends has finish_reason 'stop' and the stop as its last tokens."""
        whole = Generation([], [], [], "length")
        while True:
            count = len(whole.tokens)
            if seed is not None and count:  # the same seed would repeat the draws of the first chunk
                seed = random.Random(f"{seed} {count}").getrandbits(63)
            room = min(CHUNK, max_tokens - count)
            part = await self._sampler.generate(prompt_ids + whole.tokens, room, temperature, top_p, seed, session)
            whole = _joined(whole, part)
            end = self._end(whole.tokens[: -1 if part.finish_reason == "stop" else None], count)
            if end is not None:
                return _cut(whole, end, len(prompt_ids))
            if part.finish_reason != "length" or len(whole.tokens) >= max_tokens:
                return whole

    def _end(self, tokens: list[int], start: int) -> int | None:
        """How many tokens are kept; None without a stop. The first `start` ones contain none."""
        whole = self._renderer.text(tokens) if self._texts else ""
        texts = [stop for stop in self._texts if stop in whole]
        for count in range(start + 1, len(tokens) + 1):
            if tokens[count - 1] in self._tokens:
                self.text = self._renderer.text(tokens[: count - 1])
                return count
            text = self._renderer.text(tokens[:count]) if texts else ""
            found = [(text.index(stop), stop) for stop in texts if stop in text]
            if found:
                place, self.stop = min(found)
                self.text = text[:place]
                return count
        return None


def _joined(whole: Generation, part: Generation) -> Generation:
    offset = len(whole.tokens)
    runs = list(whole.version_runs)
    for run in part.version_runs:
        if not runs or runs[-1].version != run.version:
            runs.append(VersionRun(offset + run.start, run.version))
    routed = part.routed_experts
    if routed is not None and whole.routed_experts is not None:  # earlier tokens were sampled with their own
        routed = np.concatenate([whole.routed_experts, routed[len(whole.routed_experts) :]])
    return Generation(whole.tokens + part.tokens, whole.logprobs + part.logprobs, runs, part.finish_reason, routed)


def _cut(whole: Generation, count: int, prompt: int) -> Generation:
    """The first `count` tokens; `prompt` tokens came before them."""
    routed = whole.routed_experts
    return replace(
        whole,
        tokens=whole.tokens[:count],
        logprobs=whole.logprobs[:count],
        version_runs=[run for run in whole.version_runs if run.start < count],
        finish_reason="stop",
        routed_experts=None if routed is None else routed[: prompt + count - 1],
    )
