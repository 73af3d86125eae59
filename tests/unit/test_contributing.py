"""The recipes of CONTRIBUTING.md, applied to a copy of this tree and run as they are written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## Recipe: ([^\n]+)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # kind, file, text
COPIED = ("broker", "common", "configs", "docs", "launch", "learner", "rollout_fleet", "tests", "pyproject.toml")
LIMIT_S = 600.0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "img")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    return tmp_path


def change(path: Path, diff: str) -> None:
    """Replace the lines of a diff that has neither header nor line numbers; they stand in the file once.

    A line may be the beginning or the end of the file's line.
    """
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


def run(command: str, tree: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PYTHONPATH": str(tree), "PATH": path, "OMP_NUM_THREADS": "1"}
    variables.pop("PYTEST_ADDOPTS", None)
    shell = ["bash", "-euc", command]
    done = subprocess.run(shell, cwd=tree, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_three_recipes_and_each_ends_with_a_check() -> None:
    assert list(RECIPES) == ["a loss", "an environment", "a broker store"]
    for recipe in RECIPES.values():
        assert BLOCK.findall(recipe)[-1][0] == "bash"


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_it_is_written(tree: Path, name: str) -> None:
    for kind, file, text in BLOCK.findall(RECIPES[name]):
        if kind == "diff":
            change(tree / file, text.rstrip("\n"))
        elif kind == "bash":
            run(text, tree)
        else:
            (tree / file).write_text(text, encoding="utf-8")
