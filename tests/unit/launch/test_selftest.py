"""`slipstream selftest` over items made here: tests that pass, fail, skip, hang, or do not apply."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from common.process.install import SOURCES as ROOT
from launch.checks import selftest
from launch.checks.machine import Machine, look
from launch.checks.selftest import PACE, Item, items
from launch.cli import main
from tests.rigs.waiting import until

TESTS = """
import os, subprocess, sys, time, warnings
import pytest

warnings.warn("of a library that is newer than the pinned one", DeprecationWarning)

def test_good(record_property):
    record_property("gain", 1.5)
    assert os.environ["WORD"] == "own"

def test_bad():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="the moon is full")
def test_none(): ...

def test_pace(record_property):
    record_property("pace", os.environ["SLIPSTREAM_TEST_PACE"])

def test_hangs(tmp_path):
    log = tmp_path / "job" / "logs" / "rollout-node-0.log"
    log.parent.mkdir(parents=True)
    log.write_text("the engine compiles\\n")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open(os.environ["PIDS"], "w").write(str(child.pid))
    time.sleep(1000)
"""


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Items of these names, each the test of that name."""
    file = tmp_path / "test_made.py"
    file.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")  # as in the repository
    made = Item("", "made", (), ("json",), env={"WORD": "own", "PIDS": str(tmp_path / "pids")}, limit_s=60)

    def choose(*names: str, **changes: object) -> None:
        found = tuple(replace(made, name=n, tests=(f"{file}::test_{n}",), **changes) for n in names)
        monkeypatch.setattr(selftest, "items", lambda machine: found)

    return choose


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["selftest", "--json", *words])
    return code, {item["name"]: item for item in json.loads(capsys.readouterr().out)["items"]}


def test_results_counts_reasons_and_figures_of_each_item(choose, capsys: pytest.CaptureFixture[str]) -> None:
    choose("good", "bad", "none")
    code, found = told(capsys)
    assert code == 1
    assert [found[name]["state"] for name in ("environment", "good", "bad", "none")] == [
        "passed", "passed", "failed", "failed"
    ]  # fmt: skip
    assert found["good"]["tests"] == {"passed": 1} and found["good"]["figures"] == {"gain": "1.5"}
    assert found["bad"]["why"].startswith("test_bad: ") and "one is not two" in found["bad"]["why"]
    assert found["none"]["skipped"] == {"the moon is full": 1}, "an item whose tests are all skipped proves nothing"
    (versions,) = (value for name, value in found["environment"]["figures"].items() if name.startswith("learner"))
    assert re.search(r"\btorch \d", versions)


def test_one_item_for_a_person(choose, capsys: pytest.CaptureFixture[str]) -> None:
    choose("good", "bad")
    assert main(["selftest", "--only", "good"]) == 0
    out = capsys.readouterr().out
    assert "✓ good: made: passed (1 passed, " in out and "    gain: 1.5\n" in out and "bad" not in out
    assert out.endswith("selftest: nothing failed\n")


def test_a_test_that_hangs_is_ended_with_all_that_it_started(
    choose, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choose("hangs", limit_s=1.5)  # ten times that on a CPU
    code, found = told(capsys)
    assert (code, found["hangs"]["state"]) == (1, "failed")
    assert found["hangs"]["why"].startswith("ended after 15 s")
    assert found["hangs"]["why"].endswith("job/logs/rollout-node-0.log:\nthe engine compiles")
    pid = int((tmp_path / "pids").read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_an_item_that_does_not_apply_or_has_no_time_says_why(choose, capsys: pytest.CaptureFixture[str]) -> None:
    choose("good", packages=("json", "no_such_module"))
    code, found = told(capsys)
    assert (code, found["good"]["state"]) == (0, "not applicable")
    assert found["good"]["why"].endswith("has no no_such_module")
    choose("good", cuda=True)
    assert told(capsys)[1]["good"]["why"] == "no GPU"
    choose("good")
    code, found = told(capsys, "--minutes", "1e-9")
    assert (code, found["good"]["why"]) == (1, "no time was left (--minutes)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "partiy"], "--only: expected parity, layouts, plain, .*, found partiy; nearest: parity"),
        (["--minutes", "0"], "--minutes: expected a positive number, found 0"),
    ],
)
def test_bad_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *words]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_without_a_checkout_there_are_no_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "SOURCES", tmp_path)
    assert main(["selftest"]) == 2
    assert f"{tmp_path} is" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "ranks"), [(0, "2"), (1, "2"), (4, "4"), (16, "8")])
def test_the_tests_exist_and_layouts_use_the_gpus(gpus: int, ranks: str) -> None:
    machine: Machine = replace(look(), gpus=("NVIDIA H200",) * gpus)
    found = {item.name: item for item in items(machine)}
    assert [*found].index("quickstart") == (0 if gpus else len(found) - 1), "on GPUs it must not run out of time"
    assert found["quickstart"].limit_s == 450
    for item in found.values():
        assert (ROOT / item.tests[0]).is_file()
    assert found["layouts"].env == {"SLIPSTREAM_TEST_RANKS": ranks}
    assert found["weights"].tests[1:] == (("-k", "nccl") if gpus else ())
    assert sum(item.limit_s for item in found.values()) < 1700


def test_limits_follow_from_the_pace_of_the_device(choose, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(look(), gpus=("NVIDIA H200",))
    monkeypatch.setattr(selftest, "interpreter", lambda role: (None, sys.executable))
    found = selftest.measure(machine)  # here the CPU stands for the device
    assert json.loads(found.measured)["joined_s"] > 0 and "two new processes meet in " in found.told
    monkeypatch.setenv(PACE, json.dumps({"joined_s": 3 * selftest.JOINED_S, "reduced_s": 0.01}))
    slow = selftest.measure(machine)
    assert slow.limit_s(Item("", "", (), (), limit_s=100, sums=5000)) == pytest.approx(350)
    monkeypatch.setattr(selftest, "interpreter", lambda role: (None, "false"))
    unknown = selftest.measure(machine)
    assert unknown.slower == 1.0 and unknown.told.startswith("unknown")
    assert selftest.measure(replace(machine, gpus=())).slower == selftest.CPU_SLOWER


def test_the_tests_of_an_item_know_the_pace(choose) -> None:
    choose("good")
    (item,) = selftest.items(look())
    made = replace(item, tests=(item.tests[0].replace("good", "pace"),), limit_s=600)
    result = selftest.run(made, look(), selftest.Pace(1.0, measured="12"), 600)
    assert (result.state, result.figures) == ("passed", {"pace": "12"})
