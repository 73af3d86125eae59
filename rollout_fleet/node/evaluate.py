"""Accuracy on held-out problems, through the same engine, driver and environment as training."""

import asyncio
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any, TextIO

import msgspec

from common.config.converted import is_converted, read_converted
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.evaluation import UNSCORED, EvalResult, dataset_names
from common.json_lines import dataset_rows
from common.process.progress import bar
from common.rollouts import Sample
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.episode.sampler_protocol import Sampler


def run_eval(config: Config, model_path: Path, out: TextIO | None = None) -> EvalResult:
    """Evaluate a Hugging Face folder with its tokenizer on evaluation.datasets, all together and each.

    `out`: where its progress is shown; None: nowhere. Raises UsageError without dataset or model or for an unusable
    environment, SlipstreamError when the engine failed or no sample has a score.
    """
    key = "evaluation.datasets"
    datasets = config.evaluation.paths
    if not datasets:
        raise UsageError(f"{key} names no held-out problems")
    rows = [[msgspec.json.decode(row) for _, row in dataset_rows(Path(path), key)] for path in datasets]
    problems = dict(zip(dataset_names(datasets), rows, strict=True))
    sources = dict(zip(problems, (source for source, _ in config.evaluation.held_out), strict=True))
    if not (model_path / "config.json").is_file():
        raise UsageError(f"{model_path} is not a model folder; has the run finished? --model DIR names another")
    if is_converted(model_path):
        source = read_converted(model_path).source
        raise UsageError(f"{model_path} has weights for the learner only; evaluate the folder it is made of, {source}")
    model = msgspec.structs.replace(config.model, path=str(model_path))
    config = msgspec.structs.replace(config, model=model)
    jobs = {name: _untrained(config.sources[source]) for name, source in sources.items()}
    return asyncio.run(_with_engine(config, problems, jobs, out))


def _untrained(config: Config) -> Config:
    """The same job without the penalty, which is for training."""
    return msgspec.structs.replace(config, tasks=msgspec.structs.replace(config.tasks, truncated="counted"))


async def _with_engine(
    config: Config, problems: dict[str, list[dict[str, Any]]], jobs: dict[str, Config], out: TextIO | None
) -> EvalResult:
    """`jobs`: that of the source to which each dataset belongs."""
    from rollout_fleet.engine.engine import Engine

    engine = Engine(config, weights="folder")
    thread = EnvironmentThread()
    try:
        for job in jobs.values():
            build_driver(job, engine, thread)  # a config error shows before the engine starts
        await engine.start()
        with bar("eval", 2 * sum(map(len, problems.values())), "episodes", quiet=out is None, out=out) as show:
            done = count(1)
            tell = lambda: show(next(done))  # noqa: E731
            found = {
                name: [await evaluate(engine, jobs[name], rows, greedy, thread, tell) for greedy in (True, False)]
                for name, rows in problems.items()
            }
    finally:
        await engine.shutdown()
        thread.close()
    parts = {name: _result(*samples) for name, samples in found.items()} if len(found) > 1 else {}
    whole = _result(*(list(chain.from_iterable(samples)) for samples in zip(*found.values(), strict=True)))
    return msgspec.structs.replace(whole, datasets=parts)


def _result(greedy: list[Sample], sampled: list[Sample]) -> EvalResult:
    failed = sum(s.error is not None for s in greedy + sampled)
    return EvalResult(accuracy(greedy), accuracy(sampled), len(greedy), failed)


async def evaluate(
    sampler: Sampler,
    config: Config,
    problems: list[dict[str, Any]],
    greedy: bool,
    thread: EnvironmentThread,
    tell: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """One episode per problem, `rollout.concurrency` at a time, in the order of `problems`.

    `tell` is called after each.
    """
    driver = build_driver(config, sampler, thread, Sampling(temperature=0.0) if greedy else None)
    slots = asyncio.Semaphore(config.rollout.concurrency_bounds[1])

    async def one(index: int, problem: dict[str, Any]) -> Sample:
        async with slots:
            sample = await driver.run(problem, config.run.seed + index)
        tell()
        return sample

    try:
        return await asyncio.gather(*(one(i, p) for i, p in enumerate(problems)))
    finally:
        await driver.close()


def accuracy(samples: list[Sample]) -> float:
    """Mean reward. Failed samples count 0, those that no scorer could judge are left out.

    Raises SlipstreamError when none is left.
    """
    scored = [s.reward if s.error is None else 0.0 for s in samples if s.stop_reason != UNSCORED]
    if not scored:
        raise SlipstreamError(f"none of {len(samples)} samples has a score")
    return sum(scored) / len(scored)
