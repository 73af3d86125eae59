"""Tokens per second of a node's engine against bare LLM.generate: same prompts, same cores, in turns.

- bare: vllm.LLM in one process without our plugins, as for RL: the log-probability of every token, no text.
- node: rollout_fleet's Engine, one `generate` per turn of a sample, as the episode driver calls it.

Both serve all requests at once. A sample has one turn, or four with a quarter of the tokens each: it continues after
`OBSERVATION` further tokens. Bare vLLM knows no episodes and serves the turns one after another. Each side runs in a
process of its own, warms up, then serves rounds; sides alternate. Wall-clock suffers from other work on the machine;
tokens per CPU second, over all processes of a side, does not. Short mode: `--rounds 1 --pairs 1 --requests 16`.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import harness

from common.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig

OBSERVATION = [9, 8, 7, 6, 5, 4, 10, 11]  # the environment's answer between two turns
GROUP, PROMPT = 8, 16  # requests with the same prompt, tokens of a prompt
LENGTH, CACHE_MIB = 1024, 256  # longest request in tokens, size of the KV cache
QUIET = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
PLAIN = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def prompts(requests: int) -> list[list[int]]:
    """Each prompt `GROUP` times in a row, as a group of samples asks for them."""
    numbers = (i for i in range(requests // GROUP) for _ in range(GROUP))
    return [[(i * 7 + j * 3 + 5 * i * j) % 90 + 4 for j in range(PROMPT)] for i in numbers]


@contextmanager
def bare(model: str, requests: int, turns: int, tokens: int) -> Iterator[Callable[[], None]]:
    os.environ.update(PLAIN)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=LENGTH, max_num_seqs=requests,
        enable_prefix_caching=True, kv_cache_memory_bytes=CACHE_MIB << 20, logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)

    def serve() -> None:
        contexts = prompts(requests)
        for _ in range(turns):
            done = llm.generate([{"prompt_token_ids": p} for p in contexts], params, use_tqdm=False)
            answers = [list(x.outputs[0].token_ids) for x in done]
            assert all(len(answer) == tokens for answer in answers)
            contexts = [p + answer + OBSERVATION for p, answer in zip(contexts, answers, strict=True)]

    yield serve


@contextmanager
def node(model: str, requests: int, turns: int, tokens: int) -> Iterator[Callable[[], None]]:
    from rollout_fleet.engine.engine import Engine

    settings = EngineConfig(max_model_len=LENGTH, max_num_seqs=requests, kv_cache_mib=CACHE_MIB, eager=True)
    config = Config(
        run=RunConfig(name="bench", dir="unused", steps=1),
        model=ModelConfig(path=model, dtype="float32"),
        tasks=TasksConfig(environment="none", dataset="none"),
        rollout=RolloutConfig(concurrency=requests, engine=settings),
    )
    loop = asyncio.new_event_loop()
    engine = Engine(config, weights="folder", stop_token_ids=[])
    loop.run_until_complete(engine.start())

    async def one(context: list[int]) -> None:
        for _ in range(turns):
            done = await engine.generate(context, tokens)
            assert len(done.tokens) == tokens
            context = context + done.tokens + OBSERVATION

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, prompts(requests)))

    yield lambda: loop.run_until_complete(all_of_them())
    loop.run_until_complete(engine.shutdown())


def measure(side: str, rounds: int, *shape: int) -> list[dict[str, float]]:
    """Rounds of one side, in this process."""
    results = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        harness.qwen3(Path(folder), vocab_size=128, hidden_size=128, num_hidden_layers=2, initializer_range=0.08)
        with (bare if side == "bare" else node)(folder, *shape) as serve:
            serve()  # warm
            for _ in range(rounds):
                before_s = time.process_time() + harness.children_cpu_s()
                _, wall_s = harness.timed(serve)
                cpu_s = time.process_time() + harness.children_cpu_s() - before_s
                results.append({"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)})
    return results


def compared(options: harness.Options, turns: int) -> harness.Figures:
    """Both sides in turns."""

    def run_side(side: str, _: int) -> list[dict[str, float]]:
        shape = (options.requests, turns, options.tokens // turns)
        return harness.apart(measure, side, options.rounds, *shape, **QUIET)

    found = harness.in_turns(("bare", "node"), range(options.pairs), run_side)
    return {side: {"rounds": [*itertools.chain(*runs)]} for side, runs in found.items()}


@harness.script(requests=256, tokens=128, rounds=4, pairs=2)
def main(options: harness.Options) -> harness.Figures:
    return {"rounds": options.rounds * options.pairs, **compared(options, 1), "multi_turn": compared(options, 4)}
