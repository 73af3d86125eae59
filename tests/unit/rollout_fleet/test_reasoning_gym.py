"""reasoning-gym: tasks generated again from their number, judged by their own scorers, in the adapters' interpreter."""

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.rollouts import Sample
from rollout_fleet.environments.builtin.reasoning_gym_tasks import ReasoningGym
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Budget
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, prompts_of, say
from tests.unit.rollout_fleet.fleet_fakes import play as episode

ROOT = Path(__file__).parents[3]
MODULE = ReasoningGym.__module__
OPTIONS = {"name": "leg_counting", "parameters": '{"max_animals": 4}', "tasks_seed": 3}


def python() -> str:
    found = os.environ.get("SLIPSTREAM_VERIFIERS_PYTHON")
    if not found:
        pytest.skip("SLIPSTREAM_VERIFIERS_PYTHON names no interpreter; `bash launch/setup.sh adapters` builds one")
    return found


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    given = ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())
    imports = f"from pathlib import Path; from {MODULE} import export_rows"
    code = f"{imports}; export_rows(path=Path({str(path)!r}), rows=3, {given})"
    subprocess.run([python(), "-W", "ignore", "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [json.loads(line) for line in path.read_text().splitlines()]


def play(row: dict[str, Any], said: str, **options: Any) -> tuple[Sample, str]:
    sampler = ScriptedSampler(in_turn(say(said)))
    limits = replace(ReasoningGym.LIMITS, reset_s=LIMIT_S, step_s=LIMIT_S)
    with contextlib.closing(ProcessHost((MODULE, "reasoning_gym"), python())) as processes:
        backend = ProcessBackend(f"{MODULE}:ReasoningGym", {**OPTIONS, **options}, limits, LIMIT_S, processes, False)
        driver = make_driver(sampler, backend, budget=Budget(1, 200, 5000), limits=limits)
        sample = episode(driver, row)
    return sample, "".join(prompts_of(sampler))


def test_a_row_is_played_as_it_was_generated_and_judged_by_the_dataset_s_scorer(rows: list[dict[str, Any]]) -> None:
    assert [row["index"] for row in rows] == [0, 1, 2] and len({row["question"] for row in rows}) == 3
    right, prompt = play(rows[1], f"<answer>{rows[1]['answer']}</answer>")
    assert (right.error, right.reward, right.metrics) == (None, 1.0, {"answered": 1.0})
    assert prompt.startswith(rows[1]["question"])
    wrong, _ = play(rows[1], f"<answer>{int(rows[1]['answer']) + 1}</answer>")
    assert wrong.reward < 1.0 and wrong.error is None


def test_an_answer_that_the_scorer_cannot_read_is_worth_nothing_and_is_no_failure() -> None:
    sample, _ = play({"index": 0}, "<answer>two times three</answer>", name="prime_factorization", parameters="{}")
    assert (sample.error, sample.reward, sample.metrics) == (None, 0.0, {"answered": 1.0})


def test_a_row_of_other_parameters_fails_with_what_to_do(rows: list[dict[str, Any]]) -> None:
    sample, _ = play(rows[2], "x", tasks_seed=4)
    assert sample.stop_reason == "environment_error" and "export the rows" in str(sample.error)
