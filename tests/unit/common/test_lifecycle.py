"""Processes end with their parent, or drain on the first signal."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from common.process.lifecycle import SUPERVISOR_ENV, DrainFlag, alive
from tests.waiting import LIMIT_S, until

CHILD = (
    "import time; from common.process.lifecycle import {call}; "
    "{call}({arguments}); print('ready', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("how", ["asked", "supervised"])
def test_child_dies_when_its_parent_is_killed(how):
    child = CHILD.format(call="die_with_parent", arguments="os.getppid()").replace("from", "import os\nfrom", 1)
    environment = ""
    if how == "supervised":
        child = CHILD.format(call="join_supervisor", arguments="")
        environment = f"os.environ[{SUPERVISOR_ENV!r}] = str(os.getpid());"
    parent = (
        f"import os, subprocess, sys; {environment}"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True);"
        "p.stdout.readline(); print(p.pid, flush=True); import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    until(lambda: not alive(pid))


def test_child_of_a_parent_that_is_gone_ends_at_once():
    code = CHILD.format(call="die_with_parent", arguments="2147483000")
    done = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False, capture_output=True)
    assert done.returncode == 1
    assert done.stdout == b""


def test_zombie_and_unknown_process_are_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    until(lambda: not alive(process.pid))  # ended, not waited for
    process.wait(timeout=LIMIT_S)
    assert alive(os.getpid())


@pytest.fixture
def handlers():
    saved = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_the_flag_and_wakes_the_waiter(handlers, number):
    flag = DrainFlag.install()
    assert not flag.wait(0.0)
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    assert flag.wait(LIMIT_S)
    assert flag.reason == signal.Signals(number).name
    assert flag.wait(0.0)  # stays set


def test_first_reason_stays(handlers):
    flag = DrainFlag()
    flag.set("job done")
    flag.set("later")
    assert flag.is_set
    assert flag.reason == "job done"


def test_second_signal_ends_the_process_after_the_hook():
    code = (
        "import os, signal, sys, time; from common.process.lifecycle import DrainFlag\n"
        "flag = DrainFlag.install(on_second=lambda: os.write(1, b'hook'))\n"
        "os.kill(os.getpid(), signal.SIGTERM); flag.wait(5); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False, capture_output=True)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == b"hook"


@pytest.mark.parametrize("pid", [1 << 31, 1 << 63, 1 << 80])
def test_a_number_that_no_process_can_have_is_of_no_living_one(pid: int) -> None:
    assert not alive(pid)
    assert alive(os.getpid())
