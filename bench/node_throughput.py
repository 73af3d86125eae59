"""Tokens per second of a node's engine against bare LLM.generate: same prompts, same cores, in turns.

- bare: vllm.LLM in one process without our plugins, as for RL: the log-probability of every token, no text.
- node: rollout_fleet's Engine, one `generate` per turn of a sample, as the episode driver calls it.

Both serve at most `--concurrency` requests at a time: the batch decides how long a token takes. With `--turns` above 1
a sample continues after `OBSERVATION` further tokens. Bare vLLM knows no episodes and serves the turns one after
another. Each side runs in a process of its own, warms up, then serves rounds; sides alternate. `--tokens` counts one
turn. Short mode: `--rounds 2 --pairs 1`. Everything: `--all` (single-turn and four turns, one JSON). Wall-clock suffers
from other work on the machine; tokens per CPU second, over all processes of a side, does not.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import harness

from common.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig

OBSERVATION = [9, 8, 7, 6, 5, 4, 10, 11]  # the environment's answer between two turns


def prompts(arguments: harness.Options) -> list[list[int]]:
    """Each prompt `group` times in a row, as a group of samples asks for them."""
    return [
        [(i * 7 + j * 3 + 5 * i * j) % 90 + 4 for j in range(arguments.prompt)]
        for i in range(arguments.requests // arguments.group)
        for _ in range(arguments.group)
    ]


def tiny_model(folder: Path, hidden: int, layers: int) -> None:
    harness.qwen3(folder, vocab_size=128, hidden_size=hidden, num_hidden_layers=layers, initializer_range=0.08)


@contextmanager
def bare(arguments: harness.Options) -> Iterator[Callable[[], None]]:
    os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.model, dtype=arguments.dtype, enforce_eager=True, max_model_len=1024,
        max_num_seqs=arguments.concurrency, enable_prefix_caching=True,
        kv_cache_memory_bytes=256 << 20, logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
    )  # fmt: skip
    params = SamplingParams(max_tokens=arguments.tokens, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False)

    def serve() -> None:
        contexts = prompts(arguments)
        for _ in range(arguments.turns):
            done = llm.generate([{"prompt_token_ids": p} for p in contexts], params, use_tqdm=False)
            answers = [list(x.outputs[0].token_ids) for x in done]
            assert all(len(answer) == arguments.tokens for answer in answers)
            contexts = [p + answer + OBSERVATION for p, answer in zip(contexts, answers, strict=True)]

    yield serve


def engine_config(model: str, dtype: str, requests: int) -> Config:
    """Config of an engine alone, for at most so many requests at a time."""
    engine = EngineConfig(max_model_len=1024, max_num_seqs=requests, kv_cache_mib=256, eager=True)
    return Config(
        run=RunConfig(name="bench", dir="unused", steps=1),
        model=ModelConfig(path=model, dtype=dtype),
        tasks=TasksConfig(environment="none", dataset="none"),
        rollout=RolloutConfig(concurrency=requests, engine=engine),
    )


@contextmanager
def node(arguments: harness.Options) -> Iterator[Callable[[], None]]:
    from rollout_fleet.engine.engine import Engine

    config = engine_config(arguments.model, arguments.dtype, arguments.concurrency)
    loop = asyncio.new_event_loop()
    engine = Engine(config, weights="folder", stop_token_ids=[])
    loop.run_until_complete(engine.start())

    async def all_of_them() -> None:
        free = asyncio.Semaphore(arguments.concurrency)

        async def one(prompt: list[int]) -> None:
            async with free:
                context = prompt
                for _ in range(arguments.turns):
                    done = await engine.generate(context, arguments.tokens)
                    assert len(done.tokens) == arguments.tokens
                    context = context + done.tokens + OBSERVATION

        await asyncio.gather(*(one(p) for p in prompts(arguments)))

    yield lambda: loop.run_until_complete(all_of_them())
    loop.run_until_complete(engine.shutdown())


def measure(side: str, arguments: harness.Options) -> list[dict]:
    """Rounds of one side, in this process."""
    tokens, results = arguments.requests * arguments.turns * arguments.tokens, []
    with (bare if side == "bare" else node)(arguments) as serve:
        serve()  # warm
        for _ in range(arguments.rounds):
            before_s = time.process_time() + harness.children_cpu_s()
            _, wall_s = harness.timed(serve)
            cpu_s = time.process_time() + harness.children_cpu_s() - before_s
            results.append({"wall_s": wall_s, "cpu_s": cpu_s, "tokens": tokens})
    return results


def compared(arguments: harness.Options) -> dict:
    """Both sides in turns."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

    def run_side(side: str, _: int) -> list[dict]:
        return harness.apart(measure, side, arguments, **quiet)

    turns = harness.in_turns(("bare", "node"), range(arguments.pairs), run_side)
    result: dict = {
        side: {"rounds": [{k: round(v, 3) for k, v in one.items()} for found in runs for one in found]}
        for side, runs in turns.items()
    }
    left_out = ("model", "all", "dry")
    result["arguments"] = {k: v for k, v in vars(arguments).items() if k not in left_out}
    return result


@harness.script(
    model="", hidden=128, layers=2, dtype="float32", requests=256, group=8, prompt=16, tokens=128, turns=1,
    concurrency=256, rounds=4, pairs=2,
    all={"action": "store_true", "help": "1 and 4 turns, the latter with a quarter of the tokens each"},
)  # fmt: skip
def main(arguments: harness.Options) -> harness.Figures:
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            arguments.model = folder
            tiny_model(Path(folder), arguments.hidden, arguments.layers)
        result = compared(arguments)
        if arguments.all:
            several = harness.Options(**vars(arguments) | {"turns": 4, "tokens": arguments.tokens // 4})
            result["multi_turn"] = compared(several)
    return {"rounds": arguments.rounds * arguments.pairs, **result}
