"""Processes: they end with their parent or drain, a lock names its process, freed memory is used again."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from common.process.lifecycle import SUPERVISOR_ENV, DrainFlag, alive, birth_of
from common.process.lock_file import AlreadyLocked, is_locked, lock_holder, take_lock
from common.process.run_dir import BrokerFile, RunDir, running_broker, write_json
from learner.loop.run_files import read_record, write_record
from learner.rank_process import RankProcess
from tests.rigs.waiting import LIMIT_S, until

CHILD = (
    "import time; from common.process.lifecycle import {call}; "
    "{call}({arguments}); print('ready', flush=True); time.sleep(60)"
)


def test_a_process_may_raise_its_limit_of_open_files_to_the_hard_one():
    code = (
        "import resource; from common.process.lifecycle import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200)); raise_open_files()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["200", "200"]


def test_what_hangs_ends_its_process_with_the_given_code():
    code = (
        "import time; from common.process.lifecycle import leaving_after\n"
        "with leaving_after({}, 7, 'it hangs'): time.sleep({})\n"
        "print('closed')"
    )
    hung = (7, "", "gave up after 0.2 s: it hangs\n")
    for seconds, takes_s, ends in ((0.2, 1e6, hung), (1e6, 0, (0, "closed\n", ""))):
        words = [sys.executable, "-c", code.format(seconds, takes_s)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        assert (done.returncode, done.stdout, done.stderr) == ends


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


def test_zombie_and_unknown_process_are_not_alive():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    until(lambda: not alive(process.pid))  # ended, not waited for
    process.wait(timeout=LIMIT_S)
    assert [alive(pid) for pid in (os.getpid(), 1 << 31, 1 << 63, 1 << 80)] == [True, False, False, False]


def test_a_thread_is_no_process():
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, args=(LIMIT_S,))
    thread.start()
    try:
        assert thread.native_id != os.getpid()
        assert not alive(thread.native_id)
    finally:
        ended.set()
        thread.join()


def test_another_process_of_the_same_number_is_told_from_the_one_that_is_meant():
    with subprocess.Popen(["sleep", str(LIMIT_S)]) as process:
        birth = birth_of(process.pid)
        boot, ticks = birth.split()
        assert alive(process.pid, birth)
        assert not alive(process.pid, f"{boot} {int(ticks) - 1}"), "the number was another process's before"
        assert not alive(process.pid, f"another-boot {ticks}")
        process.kill()


def test_a_reused_number_is_no_broker_and_no_learner(tmp_path):
    """After a power loss, or in a new container, the pid in RUN/broker.json may be anybody's."""
    run = RunDir(tmp_path)
    here = BrokerFile.of_this_process("tcp://127.0.0.1:5999")
    before = msgspec.structs.replace(here, birth="another-boot 5", space="another-boot 4026531836")
    for file, lives in ((here, True), (msgspec.structs.replace(here, birth="another-boot 5"), False), (before, False)):
        write_json(run.broker_json, file)
        assert running_broker(run) == (here.address if lives else None)
        assert run.broker().ended != lives
    write_record(run, 1, "running", 0)
    record = read_record(run)
    assert record.runs_here and not msgspec.structs.replace(record, birth="another-boot 5").runs_here


def test_the_number_of_another_containers_process_says_nothing_about_the_broker(tmp_path):
    """Containers may have the host's name, and in each of them the same number is another process."""
    run, here = RunDir(tmp_path), BrokerFile.of_this_process("tcp://127.0.0.1:5999")
    boot, _ = here.space.split()
    for pid in (os.getpid(), 2147483000):
        write_json(run.broker_json, msgspec.structs.replace(here, pid=pid, space=f"{boot} 5"))
        assert (running_broker(run), run.broker().ended) == (None, False)


@pytest.fixture
def handlers():
    saved = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in saved.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_sets_the_flag_and_wakes_the_waiter(handlers, number):
    flag = DrainFlag.install()
    assert not flag.wait(0.0)
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
    assert flag.wait(LIMIT_S)
    flag.set("later")
    assert flag.reason == signal.Signals(number).name, "the first reason stays"
    assert flag.is_set and flag.wait(0.0)


def test_a_closed_terminal_asks_for_no_haste_and_under_nohup_for_nothing(handlers):
    flag = DrainFlag.install(on_second=lambda: pytest.fail("a SIGHUP counts as a second signal"))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert flag.reason == "SIGTERM"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    flag = DrainFlag.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag.is_set and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_closed_terminal_lets_a_rank_drain(handlers):
    rank = object.__new__(RankProcess)
    rank._reason = None
    rank.drain_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert rank.stop_requested() == "SIGHUP"


SECOND = (
    "import os, signal, sys, time; from common.process.lifecycle import DrainFlag\n"
    "flag = DrainFlag.install(on_second=lambda: os.write(1, b'hook'))\n"
    "os.kill(os.getpid(), signal.SIGTERM); flag.wait(5); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
)
ORPHAN = CHILD.format(call="die_with_parent", arguments="2147483000")


@pytest.mark.parametrize(("code", "ended"), [(SECOND, (-signal.SIGTERM, b"hook")), (ORPHAN, (1, b""))])
def test_a_process_ends_after_the_hook_of_a_second_signal_and_at_once_when_its_parent_is_gone(code, ended):
    done = subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S, check=False, capture_output=True)
    assert (done.returncode, done.stdout) == ended


def test_a_process_that_looks_at_a_lock_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "up.lock"
    with path.open("w") as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(looks, fcntl.LOCK_UN))
        take_lock(path).close()


def test_a_lock_keeps_others_out_names_its_process_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "up.lock"
    assert not is_locked(path)
    with take_lock(path):
        assert (is_locked(path), lock_holder(path)) == (True, os.getpid())
        with pytest.raises(AlreadyLocked) as caught:
            take_lock(path)
        assert caught.value.holder == str(os.getpid())
    assert not is_locked(path)
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        taken = take_lock(path)
        assert taken.name
        os.write(done, b"1")
        signal.pause()
    assert os.read(ready, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    take_lock(path).close()
    os.close(ready)
    os.close(done)


FAULTS = """
import resource, sys
from common.process.lifecycle import keep_freed_memory
if sys.argv[1] != "default" and not keep_freed_memory(one_heap=sys.argv[1] == "one_heap"):
    sys.exit("not taken")
def turn():
    blocks = [bytes(600_000) for _ in range(20)]
    blocks.clear()
turn(); turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str) -> int:
    command = [sys.executable, "-c", FAULTS, setting]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    found = {setting: faults(setting) for setting in ("default", "kept", "one_heap")}
    assert all(found[kept] < 2000 and 5 * found[kept] < found["default"] for kept in ("kept", "one_heap")), found
