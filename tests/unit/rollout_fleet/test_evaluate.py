"""Evaluation over the episode driver."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from common.config.observing import EvaluationConfig
from common.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from common.errors import SlipstreamError, UsageError
from common.evaluation import UNSCORED
from common.rollouts import Sample
from common.wire_types import Array
from rollout_fleet.engine.engine import Engine
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.protocol import StopReason
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.episode.sampler_protocol import Generation
from rollout_fleet.node import evaluate as module
from tests.rigs.configs import converted_folder
from tests.rigs.refusals import refused
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, add, make_driver, new_host, say

PROBLEMS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(10)]


def config(*datasets: str, concurrency: int = 3) -> Config:
    return Config(
        run=RunConfig(name="t", dir="unset", steps=1),
        model=ModelConfig(path="unset"),
        tasks=TasksConfig(environment="addition", dataset="unset"),
        evaluation=EvaluationConfig(datasets=list(datasets)),
        rollout=RolloutConfig(concurrency=concurrency, temperature=0.7, engine=EngineConfig(max_model_len=64)),
    )


def evaluated(monkeypatch: pytest.MonkeyPatch, sampler: ScriptedSampler, greedy: bool) -> tuple[list[Sample], Any]:
    asked: list[Sampling | None] = []

    def build(config: Config, sampler: Any, host: Any, sampling: Sampling | None) -> Any:
        asked.append(sampling)
        return make_driver(sampler, Addition, host=host)

    monkeypatch.setattr(module, "build_driver", build)
    return asyncio.run(module.evaluate(sampler, config(), PROBLEMS, greedy, new_host())), asked[0]


def test_each_problem_is_played_once_in_order_and_bounded_and_a_failed_one_counts_as_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(prompt: str) -> Generation | Exception:
        return say(" =0") if "7+" in prompt else ValueError("no") if "3+" in prompt else add(prompt)

    sampler = ScriptedSampler(answer, delay_s=0.005)
    samples, _ = evaluated(monkeypatch, sampler, greedy=False)
    assert [s.reward for s in samples] == [1.0] * 3 + [0.0] + [1.0] * 3 + [0.0] + [1.0] * 2
    assert (module.accuracy(samples), sampler.most_at_once) == (0.8, 3)


def test_a_sample_that_no_scorer_could_judge_is_left_out() -> None:
    nothing = Array.of([], "int32")

    def ended(reward: float, error: str | None = None, reason: str = "stop") -> Sample:
        return Sample(nothing, nothing, nothing, [], reward, reason, error=error)

    assert UNSCORED == StopReason.SCORER_ERROR
    unscored, broken = ended(0.0, "no verdict", UNSCORED), ended(0.0, "raised", "environment_error")
    assert module.accuracy([ended(1.0), unscored, ended(0.5), broken]) == 0.5
    with refused(SlipstreamError, 2):
        module.accuracy([unscored, unscored])


def test_greedy_is_temperature_zero_and_sampling_is_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert evaluated(monkeypatch, ScriptedSampler(add), greedy=True)[1] == Sampling(temperature=0.0)
    assert evaluated(monkeypatch, ScriptedSampler(add), greedy=False)[1] is None


async def test_a_model_that_the_engine_cannot_serve_is_a_usage_error(tmp_path: Path) -> None:
    class Refusing(Engine):
        def _create(self) -> Any:
            raise UsageError("no model that generates text")

    (tmp_path / "config.json").write_text("{}")
    engine = Refusing(structs.replace(config(), model=ModelConfig(path=str(tmp_path))))
    with refused(UsageError, "no model that generates text"):
        await engine.start()


def test_evaluation_needs_held_out_problems_and_a_model(tmp_path: Path) -> None:
    with refused(UsageError, "evaluation.datasets"):
        module.run_eval(config(), tmp_path)
    (tmp_path / "held_out.jsonl").write_text('{"a": 1}\n[2]\n')
    with refused(UsageError, "evaluation.datasets", "held_out.jsonl line 2", "JSON object"):
        module.run_eval(config(str(tmp_path / "held_out.jsonl")), tmp_path)
    (tmp_path / "held_out.jsonl").write_text('{"a": 1}\n')
    with refused(UsageError, tmp_path / "absent", "--model DIR"):
        module.run_eval(config(str(tmp_path / "held_out.jsonl")), tmp_path / "absent")
    converted = converted_folder(tmp_path / "converted")
    with refused(UsageError, converted, "/models/it"):
        module.run_eval(config(str(tmp_path / "held_out.jsonl")), converted)


def test_several_datasets_are_evaluated_together_and_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NoEngine(ScriptedSampler):
        async def start(self) -> None: ...

        async def shutdown(self) -> None: ...

    def wrong_from_ten_on(prompt: str) -> Generation:
        return say(" =0") if "10+" in prompt else add(prompt)

    monkeypatch.setattr("rollout_fleet.engine.engine.Engine", lambda *_, **__: NoEngine(wrong_from_ten_on))
    monkeypatch.setattr(
        module, "build_driver", lambda c, sampler, host, s=None: make_driver(sampler, Addition, host=host)
    )
    for name, first, count in (("easy", 0, 3), ("hard", 10, 1)):
        rows = [json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) for n in range(first, first + count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("common.process.progress.LINE_EVERY_S", 0.0)
    shown = StringIO()
    found = module.run_eval(config(str(tmp_path / "easy.jsonl"), str(tmp_path / "hard.jsonl")), tmp_path, shown)
    assert [each.partition(",")[0] for each in shown.getvalue().splitlines()] == [
        f"eval: {n} of 8 episodes" for n in range(1, 9)
    ]
    assert (found.greedy_accuracy, found.sampled_accuracy, found.problems) == (0.75, 0.75, 4)
    accuracies = [(part.problems, part.greedy_accuracy) for part in found.datasets.values()]
    assert accuracies == [(3, 1.0), (1, 0.0)]
    assert [name.split("-")[-1] for name in found.datasets] == ["easy", "hard"]
    assert module.run_eval(config(str(tmp_path / "easy.jsonl")), tmp_path).datasets == {}
