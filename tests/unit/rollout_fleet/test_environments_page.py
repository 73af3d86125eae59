"""docs/environments.md: its environment runs as it stands there, its tables and figures are those of the code."""

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from common.config.tasks import LimitsConfig
from rollout_fleet.environments import registry
from rollout_fleet.environments.description import describe
from rollout_fleet.environments.protocol import Limits, StopReason
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler, in_turn, make_driver, say

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
HANGMAN, PLAY, TOOLS, AGENT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_environment_of_the_page_has_at_most_30_lines_and_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(HANGMAN.splitlines()) <= 30
    (tmp_path / "hangman.py").write_text(HANGMAN)
    monkeypatch.syspath_prepend(tmp_path)
    environment = registry.resolve("hangman:Hangman")
    describe("hangman:Hangman", {"lives": 3})
    sampler = ScriptedSampler(in_turn(say("e"), say("x"), say("t"), say("R")))
    driver = make_driver(sampler, environment, {"lives": 3}, limits=environment.LIMITS)  # type: ignore[attr-defined]
    sample = asyncio.run(driver.run({"word": "tree"}, 0))
    assert (sample.error, sample.stop_reason) == (None, "environment_done")
    assert sample.turn_rewards == [0.5, -0.1, 0.25, 0.25] and sample.metrics == {"lives": 2.0}
    said = "".join(map(chr, sampler.calls[3].prompt))
    assert said.startswith("Guess letters of: ____\n") and said.endswith("\nt_ee, 2 lives\n")


def test_the_page_shows_how_to_play_it_without_an_engine(tmp_path: Path) -> None:
    (tmp_path / "hangman.py").write_text(HANGMAN)
    (tmp_path / "play.py").write_text(PLAY)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command, variables = [sys.executable, "play.py"], {**os.environ, "PYTHONPATH": path}
    said = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("Guess letters of: ____") and "reward=0.25, done=True" in said.stdout


def test_the_other_examples_of_the_page_are_environments_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai", reason="openai comes with vLLM")
    (tmp_path / "page_tools.py").write_text(TOOLS)
    (tmp_path / "page_agent.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    assert not describe("page_tools:Calculator", {}).agent
    assert describe("page_agent:agent", {}).agent


def test_every_stop_reason_every_limit_and_every_built_in_name_is_on_the_page() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    for name in (*StopReason, *(f.name for f in fields(Limits)), *registry.BUILT_IN):
        assert f"`{name}`" in rows, name
    assert {f.name for f in fields(Limits)} == set(LimitsConfig.__struct_fields__)
