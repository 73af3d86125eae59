"""Environment names: built-in, by import path, and every way to get them wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.registry import BUILT_IN, check_libraries, plays_several_turns, resolve

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

NUMBER = 3
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_environments.py").write_text(SOURCE)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('half installed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_script.py").write_text("raise SystemExit(0)\n")
    for module in ("my_environments", "my_broken", "my_script"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def refusal(name: str, options: dict[str, object] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(name, options, file="job.yaml")
    assert caught.value.file == "job.yaml"
    return caught.value


def test_built_in_names_resolve_and_find_their_libraries_here() -> None:
    assert resolve("addition") is Addition
    needed = {"openenv": {"url": "http://127.0.0.1:1"}, "verifiers": {"env_id": "some"}}
    for name in BUILT_IN:
        check_libraries(resolve(name, needed.get(name, {})), name)


def test_an_option_that_is_needed_and_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="give the option 'url'"):
        resolve("openenv", {})


class NeedsWhatIsNotThere:
    NEEDS = ("no_such_library", "json")


def test_libraries_that_an_environment_needs_and_that_are_missing_are_named() -> None:
    with pytest.raises(ConfigError, match="'game', which needs no_such_library") as caught:
        check_libraries(NeedsWhatIsNotThere, "game")
    assert caught.value.hint == "pip install 'slipstream-rl[environments]'"


def test_a_class_beside_the_job_is_found_by_import_path(user_folder: Path) -> None:
    assert resolve("my_environments:Fine", {"level": 3}).__name__ == "Fine"


@pytest.mark.parametrize(
    ("name", "found", "hint"),
    [
        ("additon", "'additon'", "nearest built-in: 'addition'"),
        ("guess_number", "'guess_number'", "nearest built-in: 'number_guessing'"),
        ("no_such_module:Thing", "No module named 'no_such_module'", "start where no_such_module.py lies"),
        ("my_broken:Thing", "RuntimeError: half installed", ""),
        ("my_environments:Fin", "has no 'Fin'", "did you mean 'Fine'?"),
        ("my_environments:NUMBER", "which is a int", ""),
        ("my_environments:Blocking", "without it", ""),
    ],
)
def test_a_wrong_name_says_what_was_found_and_what_is_near(user_folder: Path, name: str, found: str, hint: str) -> None:
    error = refusal(name)
    assert error.key == "tasks.environment"
    assert found in error.found
    assert hint in (error.hint or "")


def test_an_unknown_option_names_the_nearest() -> None:
    error = refusal("number_guessing", {"guesss": 3})
    assert (error.key, error.hint) == ("tasks.options", "did you mean 'guesses'?")
    assert "highest, guesses" in error.expected


def test_resolving_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from rollout_fleet.environments.registry import resolve; resolve('addition'); "
        "resolve('number_guessing'); print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("my_environments:LimitsAsMapping", "expected Limits"),
        ("my_environments:NoLimits", "expected Limits"),
        ("my_environments:PreloadAsText", "expected names of modules as PRELOAD"),
        ("my_script:Fine", "does not import: SystemExit"),
    ],
)
def test_a_class_that_a_node_would_trip_over_is_refused_before(user_folder: Path, name: str, why: str) -> None:
    assert why in str(refusal(name))


@pytest.mark.parametrize(
    ("name", "several"),
    [
        ("addition", False),
        ("gsm8k", False),
        ("math", False),
        ("number_guessing", True),
        ("python_tool", True),
        ("frozen_lake", True),
        ("openenv", True),
        ("verifiers", False),
    ],
)
def test_the_source_shows_whether_an_environment_plays_several_turns(name: str, several: bool) -> None:
    assert plays_several_turns(resolve(name)) is several
