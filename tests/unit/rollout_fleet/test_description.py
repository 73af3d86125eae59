"""An environment is checked under the interpreter that will run its episodes."""

import asyncio
import sys
from pathlib import Path

import pytest

from common.config.schema import Config, LimitsConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from common.errors import ConfigError
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.environments import description
from rollout_fleet.environments.description import check_environment
from tests.unit.rollout_fleet.chat_tokenizers import qwen
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, new_host, say

GAME = """
import only_there
from rollout_fleet.environments.protocol import Limits, StepResult

print("a module may write to standard output while it is imported")

class Game:
    LIMITS = Limits(step_s=7.0, memory_mib=2048)
    PRELOAD = ("only_there",)
    def __init__(self, problem, *, seed, group_seed, level=1): self.level = level
    async def reset(self): return only_there.QUESTION
    async def step(self, action): return StepResult(reward=float(self.level))

class Needy(Game):
    NEEDS = ("there_neither",)
"""


@pytest.fixture
def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with a library that this one lacks; the working folder has an environment that imports it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_there.py").write_text("QUESTION = 'How much?'\n")
    (tmp_path / "other_game.py").write_text(GAME)
    (tmp_path / "slow_game.py").write_text("import time; time.sleep(3600)\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}/lib" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return str(python)


def tasks(python: str | None, environment: str = "other_game:Game", **options: int) -> TasksConfig:
    return TasksConfig(environment=environment, dataset="-", options=options, limits=LimitsConfig(python=python))


def test_an_environment_whose_library_only_the_named_interpreter_has_is_described_and_played(
    other_python: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="No module named 'only_there'"):
        check_environment(tasks(None))
    found = check_environment(tasks(other_python, level=3))
    assert (found.path, found.agent, found.shares_seed) == ("other_game:Game", False, True)
    assert found.modules == ("other_game", "only_there")
    assert (found.limits.step_s, found.limits.process, found.limits.python) == (7.0, True, other_python)
    qwen().save_pretrained(tmp_path / "model")
    config = Config(
        run=RunConfig(name="test", dir=str(tmp_path), steps=1),
        model=ModelConfig(path=str(tmp_path / "model")),
        tasks=tasks(other_python, level=3),
        rollout=RolloutConfig(max_tokens=64),
    )
    driver = build_driver(config, ScriptedSampler(lambda _: say("x")), new_host())
    sample = asyncio.run(driver.run({}, 0))
    assert (sample.error, sample.reward) == (None, 3.0)


@pytest.mark.parametrize(
    ("environment", "options", "key", "found"),
    [
        ("other_game:Gam", {}, "tasks.environment", "has no 'Gam'"),
        ("no_such_game:Game", {}, "tasks.environment", "No module named 'no_such_game'"),
        ("other_game:Needy", {}, "tasks.environment", "which needs there_neither"),
        ("other_game:Game", {"levl": 3}, "tasks.options", "levl"),
    ],
)
def test_what_is_wrong_there_is_named_as_it_would_be_here(
    other_python: str, environment: str, options: dict[str, int], key: str, found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(tasks(other_python, environment, **options), "job.yaml")
    assert (caught.value.file, caught.value.key) == ("job.yaml", key)
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (None, "which cannot be run: No such file"),
        ("#!/bin/sh\necho this is no Python >&2; exit 3\n", "exit code 3: this is no Python"),
        ("#!/bin/sh\nexit 0\n", "exit code 0: it said nothing"),
    ],
)
def test_an_interpreter_that_gives_no_answer_is_named_with_the_reason(
    tmp_path: Path, program: str | None, found: str
) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        check_environment(tasks(str(python)))
    assert caught.value.key == "tasks.limits.python"
    assert found in caught.value.found


def test_an_import_that_does_not_end_is_given_up(other_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "CHECK_S", 1.0)
    with pytest.raises(ConfigError, match="has not imported it after 1 s"):
        check_environment(tasks(other_python, "slow_game:Game"))
