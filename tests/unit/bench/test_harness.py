"""A script of bench as a process: what it writes and how it exits."""

import json
import subprocess
import sys
from pathlib import Path

import harness
import pytest

from tests.rigs.processes import OURS, ROOT

SCRIPT = """
import harness

def work(words):
    raise RuntimeError(words)

@harness.script(output=str, bad=())
def main(options):
    figures = {"rounds": 1}
    harness.part(options, figures, "good", lambda: {"s": 1.0})
    for words in options.bad:
        harness.part(options, figures, words, lambda: work(words))
    return figures
"""


@pytest.mark.parametrize("bad", [[], ["first"], ["first", "second"]])
def test_a_script_writes_all_parts_and_exits_with_1_if_one_failed(tmp_path: Path, bad: list[str]) -> None:
    script, output = tmp_path / "some.py", tmp_path / "some.json"
    script.write_text(SCRIPT)
    environment = {"PATH": "/usr/bin:/bin", **OURS, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    done = subprocess.run(
        [sys.executable, script, *bad, "--output", output], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == bool(bad), done.stderr
    assert ("failed: " + ", ".join(bad) in done.stderr) == bool(bad)
    result = json.loads(output.read_text())
    assert result["good"] == {"s": 1.0}
    assert [result[name]["error"] for name in bad] == [f"RuntimeError: {name}" for name in bad]


def test_a_command_that_runs_too_long_shows_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(line: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(line, 90, output=b"step 7", stderr=None)

    monkeypatch.setattr(harness.subprocess, "run", late)
    with pytest.raises(RuntimeError, match="sft still ran after 90 s\nstep 7"):
        harness.command("sft", timeout_s=90)
