"""Tokens per second of a node against bare vLLM: the same model, the same game, as many episodes at once, in windows.

- bare: vLLM's own LLMEngine in one process without our plugins, as for RL: the log-probability of every token, no text.
  When a turn ends, the next one begins in the same step of the engine. It knows no environment and no broker.
- engine: rollout_fleet's Engine, one `generate` per turn, as the episode driver calls it.
- node: a whole node with driver, environment, broker and a flip every few turns (bench/talk.py).

Turns end by chance, so their lengths differ. All sides serve all the time; in a window all but one are stopped.
Wall-clock suffers from other work on the machine; neighbouring windows meet the same. Short mode: `--windows 2`.
"""

import asyncio
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import psutil
import talk
from talk import END, Serving, Shape

from common.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig

SHAPES = {  # turns: long answers at once, some turns, and many turns whose context is mostly read
    "one": Shape(turns=1, answer=128, prompt=16, observation=0, requests=256),
    "four": Shape(turns=4, answer=32, prompt=16, observation=8, requests=256),
    "sixteen": Shape(turns=16, answer=32, prompt=64, observation=64, requests=64),
}
# As the node: vLLM starts only where this share of a GPU is free, although its cache's size is given.
ON_CUDA: dict[str, Any] = {
    "gpu_memory_utilization": 0.01,
    "kernel_config": {"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
}
ON_CPU = Serving()
QUIET = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
PLAIN = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ON_GPU = {
    "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip


def encoded(folder: str, shape: Shape) -> tuple[Iterator[list[int]], list[list[int]]]:
    """Prompts of episodes, each `group` times in a row, and what is said before each turn but the first."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(folder).encode
    numbers = (n for n in itertools.count() for _ in range(shape.group))
    return (encode(shape.problem(n)) for n in numbers), [encode(shape.said(turn)) for turn in range(1, shape.turns)]


def bare(folder: str, shape: Shape, counter: Any, serving: Serving = ON_CPU) -> None:
    """Serve for ever."""
    import torch

    cuda = torch.cuda.is_available()
    os.environ.update(ON_GPU if cuda else QUIET | PLAIN)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    dtype: Any = serving.dtype
    llm = LLM(
        folder, dtype=dtype, enforce_eager=serving.eager, max_model_len=shape.longest,
        max_num_seqs=shape.requests, enable_prefix_caching=True, kv_cache_memory_bytes=serving.kv_cache_mib << 20,
        max_num_batched_tokens=serving.max_batched_tokens, logprobs_mode="processed_logprobs", skip_tokenizer_init=True,
        **(ON_CUDA if cuda else {}), **serving.extra,
    )  # fmt: skip
    engine, (prompts, said), numbers = llm.llm_engine, encoded(folder, shape), itertools.count()
    contexts: dict[str, tuple[list[int], int]] = {}
    params = SamplingParams(
        max_tokens=shape.most, temperature=1.0, logprobs=0, flat_logprobs=True, ignore_eos=True,
        stop_token_ids=[END], detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip

    def begin(context: list[int], turn: int) -> None:
        name = str(next(numbers))
        contexts[name] = context, turn
        engine.add_request(name, {"prompt_token_ids": context}, params)

    for _ in range(shape.requests):
        begin(next(prompts), 0)
    while True:
        for output in engine.step():
            context, turn = contexts.pop(output.request_id)
            tokens = list(output.outputs[0].token_ids)  # pyright: ignore[reportIndexIssue]
            counter.value += len(tokens)
            more = turn + 1 < shape.turns
            begin(context + tokens + said[turn] if more else next(prompts), turn + 1 if more else 0)


def engine(folder: str, shape: Shape, counter: Any) -> None:
    """Serve for ever."""
    os.environ.update(QUIET)
    from rollout_fleet.engine.engine import Engine

    settings = EngineConfig(
        max_model_len=shape.longest, max_num_seqs=shape.requests, kv_cache_mib=ON_CPU.kv_cache_mib,
        max_batched_tokens=ON_CPU.max_batched_tokens, eager=True,
    )  # fmt: skip
    config = Config(
        run=RunConfig(name="bench", dir="unused", steps=1),
        model=ModelConfig(path=folder, dtype="float32"),
        tasks=TasksConfig(environment="none", dataset="none"),
        rollout=RolloutConfig(concurrency=shape.requests, engine=settings),
    )
    served = Engine(config, weights="folder", stop_token_ids=[END])
    prompts, said = encoded(folder, shape)

    async def episodes() -> None:
        while True:
            context = next(prompts)
            for turn in range(shape.turns):
                done = await served.generate(context, shape.most)
                counter.value += len(done.tokens)
                context = context + done.tokens + (said[turn] if turn + 1 < shape.turns else [])

    async def serve() -> None:
        await served.start()
        await asyncio.gather(*(episodes() for _ in range(shape.requests)))

    asyncio.run(serve())


class Served:
    """A process that serves for ever and counts."""

    def __init__(self, serve: Any, folder: Path, shape: Shape, *more: Any) -> None:
        """`serve(folder, shape, counter, *more)` in a process of its own."""
        context = get_context("spawn")
        self._counter = context.Value("q", 0)
        self._process = context.Process(target=serve, args=(str(folder), shape, self._counter, *more))
        self._process.start()

    @property
    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def tokens(self) -> int:
        return self._counter.value

    def work(self) -> None:
        self._process.join(talk.TAKE_S)
        assert self._process.is_alive()

    def settle(self) -> None: ...

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
        self._process.join()


@contextmanager
def sides(names: list[str], shape: Shape) -> Iterator[dict[str, talk.Side]]:
    """These sides, warm."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder, found = Path(made), dict[str, talk.Side]()
        talk.build(folder / "model", shape.answer)
        for name in names:
            step = shape.requests // shape.group  # so that an episode meets about one flip
            if name == "node":
                found[name] = talk.NodeJob(folder / "job", folder / "model", shape, step=step)
            else:
                found[name] = Served(bare if name == "bare" else engine, folder / "model", shape)
            stack.callback(found[name].close)
            while found[name].tokens() < 4 * shape.requests * shape.answer:
                found[name].work()
            found[name].settle()
            talk.stop(found[name].processes)
        yield found


def compared(options: harness.Options, name: str) -> harness.Figures:
    with sides(options.sides, SHAPES[name]) as found:
        windows = talk.in_windows(found, options.windows, options.seconds)
    return {side: talk.totals(ones) for side, ones in windows.items()}


@harness.script(windows=8, seconds=1.5, shapes=[*SHAPES], sides=["bare", "engine", "node"])
def main(options: harness.Options) -> harness.Figures:
    return {"rounds": options.windows, **{name: compared(options, name) for name in options.shapes}}
