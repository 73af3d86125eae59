"""Environment names: built-in, by import path, every way to get them wrong, and under another interpreter."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from common.config.schema import Config, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from common.config.tasks import AgentConfig, LimitsConfig
from common.errors import ConfigError
from rollout_fleet.driver_factory import build_driver, check_rows
from rollout_fleet.environments import description
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.description import PYTHON_KEY, check_environment, check_libraries, describe
from rollout_fleet.environments.isolation import process_backend
from rollout_fleet.environments.registry import BUILT_IN, resolve
from tests.rigs.configs import job_of
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.chat_tokenizers import qwen, speaker
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, new_host, play, say

SOURCE = """
class Fine:
    def __init__(self, problem, *, seed, level=1): ...
    async def reset(self): return "?"
    async def step(self, action): ...

class Blocking:
    def reset(self): return "?"
    async def step(self, action): ...

class LimitsAsMapping(Fine):
    LIMITS = {"step_s": 5.0}

class NoLimits(Fine):
    LIMITS = None

class PreloadAsText(Fine):
    PRELOAD = "numpy"

class Needy(Fine):
    NEEDS = ("no_such_library", "json")

NUMBER = 3

def judges(answer, problem): return answer == problem["answer"]

async def half_an_agent(problem, base_url): return 1.0

def waits_for_nothing(problem, *, base_url, api_key, model, seed): return 1.0

async def judges_later(answer, problem): return judges(answer, problem)
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_environments.py").write_text(SOURCE)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('half installed')\n")
    (tmp_path / "my_script.py").write_text("raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_environments", "my_broken", "my_script"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_a_class_beside_the_job_is_found_and_built_in_names_resolve_and_find_their_libraries(user_folder: Path) -> None:
    assert describe("my_environments:Fine", {"level": 3}).path == "my_environments:Fine"
    assert resolve("addition") is Addition
    needed = {
        "mcp": {"command": "some"},
        "openenv": {"url": "http://127.0.0.1:1"},
        "reasoning_gym": {"name": "some"},
        "verifiers": {"env_id": "some"},
    }
    for name in BUILT_IN:
        describe(name, needed.get(name, {}))
        if name != "reasoning_gym":  # its library is in the adapters' environment
            check_libraries(name, needed.get(name, {}))


def test_libraries_that_an_environment_needs_and_that_are_missing_are_named(user_folder: Path) -> None:
    with refused(ConfigError, "no_such_library") as caught:
        check_libraries("my_environments:Needy", {})
    assert "slipstream-rl[environments]" in str(caught.value.hint) and PYTHON_KEY in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        ("additon", "'additon'", "nearest built-in: 'addition'"),
        ("guess_number", "'guess_number'", "nearest built-in: 'number_guessing'"),
        ("no_such_module:Thing", "No module named 'no_such_module'", "start where no_such_module.py lies"),
        ("my_broken:Thing", "RuntimeError: half installed", ""),
        ("my_environments:Fin", "has no 'Fin'", "did you mean 'Fine'?"),
        ("my_environments:NUMBER", " int", ""),
        ("my_environments:Blocking", "'async def reset', found 'my_environments:Blocking' without it", ""),
        ("my_environments:LimitsAsMapping", "Limits(...)", ""),
        ("my_environments:NoLimits", "Limits(...)", ""),
        ("my_environments:PreloadAsText", "PRELOAD", ""),
        ("my_script:Fine", "SystemExit", ""),
    ],
)
def test_a_wrong_name_says_what_was_found_and_what_is_near(user_folder: Path, name: str, found: str, hint: str) -> None:
    with refused(ConfigError, found) as caught:
        describe(name, {}, "job.yaml")
    assert (caught.value.file, caught.value.key) == ("job.yaml", "tasks.environment")
    assert hint in (caught.value.hint or "")


def test_sub_agents_of_an_environment_that_is_no_agent_are_refused() -> None:
    tasks = TasksConfig(environment="number_guessing", dataset="-", agents={"judge": AgentConfig(trained=False)})
    with refused(ConfigError, "number_guessing") as caught:
        check_environment(tasks, "job.yaml")
    assert (caught.value.file, caught.value.key) == ("job.yaml", "tasks.agents")


@pytest.mark.parametrize(
    ("name", "options", "hint", "known"),
    [
        ("number_guessing", {"guesss": 3}, "did you mean 'guesses'?", "highest, guesses, narrowing"),
        ("openenv", {}, "give the option 'url'", "url, action, observation, prompt"),
        ("verifiers", {"env": "some"}, "did you mean 'env_id'?", "env_id, arguments"),
    ],
)
def test_options_that_do_not_fit_are_told_the_nearest(
    name: str, options: dict[str, object], hint: str, known: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        describe(name, options)
    assert (caught.value.key, caught.value.hint) == ("tasks.options", hint)
    assert f"({known})" in caught.value.expected


@pytest.mark.parametrize("function", ["half_an_agent", "waits_for_nothing"])
def test_a_function_that_is_nearly_an_agent_is_told_what_an_agent_takes(user_folder: Path, function: str) -> None:
    with refused(ConfigError, "def (problem") as caught:
        describe(f"my_environments:{function}", {})
    assert "docs/agents.md" in (caught.value.hint or "")


@pytest.mark.parametrize("function", ["judges", "judges_later"])
def test_a_function_that_judges_is_refused_with_the_key_that_takes_it(user_folder: Path, function: str) -> None:
    with refused(ConfigError, f"'my_environments:{function}'") as caught:
        describe(f"my_environments:{function}", {})
    assert caught.value.key == "tasks.environment"
    assert f"tasks.reward: my_environments:{function}" in (caught.value.hint or "")


def test_resolving_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from rollout_fleet.environments.description import describe; describe('addition', {}); "
        "describe('number_guessing', {}); print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- under another interpreter


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

def reward(completion, row, *, bonus=0.0): return float(completion == only_there.QUESTION) + bonus
"""


@pytest.fixture
def other_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An interpreter with a library that this one lacks; the working folder has an environment that imports it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_there.py").write_text("QUESTION = 'How much?'\n")
    (tmp_path / "other_game.py").write_text(GAME)
    for name in ("common", "rollout_fleet"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    monkeypatch.setattr(process_backend, "CHECKOUT", None)  # as pip installs us
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
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
    with refused(ConfigError, "ModuleNotFoundError", "'only_there'"):
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
    sample = play(driver, {})
    assert (sample.error, sample.reward) == (None, 3.0)
    left = [child for child in psutil.Process().children() if "other_game" in child.cmdline()]
    assert not left, "closing the driver ends the fork server"


def test_a_reward_function_of_the_named_interpreter_is_checked_tried_and_called_there(
    other_python: str, tmp_path: Path
) -> None:
    def job(function: str, **options: float) -> Config:
        tasks = {"environment": None, "reward": function, "options": options, "limits": {"python": other_python}}
        return job_of(tmp_path, tasks=tasks, rollout={"max_tokens": 64})

    qwen().save_pretrained(tmp_path / "model")
    config = job("other_game:reward", bonus=1.0)
    (tmp_path / "train.jsonl").write_text('{"prompt": "Say it"}\n')
    check_rows(config, check_environment(config.tasks), "job.yaml")
    sample = play(build_driver(config, speaker(qwen(), "How much?"), new_host()), {"prompt": "Say it"})
    assert (sample.error, sample.reward) == (None, 2.0)
    for function, options, key in (
        ("other_game:rewrd", {}, "tasks.reward"),
        ("other_game:reward", {"bonsu": 1}, "tasks.options"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_environment(job(function, **options).tasks)
        assert caught.value.key == key


def test_an_empty_interpreter_stands_for_the_node_s_own() -> None:
    limits = check_environment(tasks("", "addition")).limits
    assert (limits.python, limits.process) == ("", False)


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
        ("#!/bin/sh\nsleep 3600\n", "has not imported it after 1 s"),
    ],
)
def test_an_interpreter_that_gives_no_answer_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, found: str
) -> None:
    monkeypatch.setattr(description, "CHECK_S", 1.0 if "not imported" in found else LIMIT_S)
    python = tmp_path / "python"
    if program is not None:
        python.write_text(program)
        python.chmod(0o755)
    with pytest.raises(ConfigError) as caught:
        check_environment(tasks(str(python)))
    assert caught.value.key == "tasks.limits.python"
    assert found in caught.value.found
