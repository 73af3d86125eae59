"""Environments in processes of their own: what goes wrong there stays there and is counted by its reason."""

import asyncio
import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.rollouts import Sample
from rollout_fleet.environments.isolation.backend import BackendFailed
from rollout_fleet.environments.isolation.process_backend import Channel, ProcessBackend, ProcessHost
from rollout_fleet.environments.protocol import Budget, Limits
from rollout_fleet.episode.rendering import Tokenizer
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S, until, until_async
from tests.unit.rollout_fleet.fleet_fakes import CharacterTokenizer, ScriptedSampler, make_driver, say, text_of

LIMITS = Limits(process=True, reset_s=300.0, step_s=300.0, memory_mib=512, observation_chars=10_000)
TIGHT = {"spin": {"cpu_s": 1}, "flood_stdout": {"cpu_s": 1}, "sleep": {"step_s": 1.5}}  # each exceeds its limit
BUDGET = Budget(4, 100, 20_000)
MARK = f"fork_server_of_{os.getpid()}"  # a module's name: it stands in the command line of what this test starts

LIBRARY = """
from pathlib import Path
with Path(__file__).with_suffix(".imports").open("a") as file:
    file.write("imported\\n")
"""
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n"

REAPER = """
import asyncio, contextlib, ctypes, psutil
from rollout_fleet.environments.isolation.sandbox import call_apart
from tests.rigs.waiting import until

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come here, and nobody reaps them

async def calls():
    for _ in range(3):
        await call_apart("os:getcwd", {}, seconds=60, memory_mib=512, answer_chars=100)

def living():
    found = psutil.Process().children(recursive=True)
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]
    return found

asyncio.run(calls())
until(lambda: len(living()) == 1, "only the fork server lives")
print(len(psutil.Process().children(recursive=True)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def modules(folder: Path) -> Iterator[tuple[str, str]]:
    """The imports of a fork server of this test; a secret is in the environment meanwhile."""
    (folder / f"{MARK}.py").touch()
    for name, more in (("plain_library", ""), ("threaded_library", THREAD)):
        (folder / f"{name}.py").write_text(LIBRARY + more)
    with pytest.MonkeyPatch.context() as patch:
        paths = filter(None, (str(Path(__file__).parent), str(folder), os.environ.get("PYTHONPATH")))
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("BROKER_SECRET", "hunter2")
        yield ("wild_environments", MARK)


@pytest.fixture(scope="module")
def host(modules: tuple[str, str]) -> Iterator[ProcessHost]:
    found = ProcessHost(modules)
    yield found
    found.close()


@pytest.fixture
def new_host() -> Iterator[Callable[..., ProcessHost]]:
    """Makes hosts that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **named: stack.enter_context(contextlib.closing(ProcessHost(*arguments, **named)))


def play(host: ProcessHost, how: str, count: int = 1, tokenizer: Tokenizer | None = None) -> list[Sample]:
    limits, sampler = replace(LIMITS, **TIGHT.get(how, {})), ScriptedSampler(lambda _: say("x"))
    backend = ProcessBackend("wild_environments:Wild", {}, limits, LIMIT_S, host, shares_seed=True)

    async def once() -> list[Sample]:
        driver = make_driver(sampler, backend, None, BUDGET, limits=limits, tokenizer=tokenizer)
        return await asyncio.gather(*(driver.run({"how": how}, 3 + i, group_seed=3) for i in range(count)))

    return asyncio.run(once())


def left_over() -> list[psutil.Process]:
    """Processes that run this test's environments."""
    return [process for process in psutil.process_iter(["cmdline", "ppid"]) if MARK in (process.info["cmdline"] or [])]


def test_an_episode_runs_in_its_own_process_as_it_would_in_the_node(host: ProcessHost) -> None:
    samples = play(host, "plain", count=3)
    assert [(s.stop_reason, s.reward, s.metrics) for s in samples] == [
        ("stop", float((3 + i) * 100 + 3), {"turns": 1.0}) for i in range(3)
    ]


def test_it_has_no_secrets_and_no_descriptors_of_the_node(host: ProcessHost, tmp_path: Path) -> None:
    with (tmp_path / "open in the node").open("w"):
        (sample,) = play(host, "tell")
    assert (sample.stop_reason, sample.turn_rewards) == ("environment_done", [0.25, 303.0])
    lines = text_of(sample, 0).splitlines()
    assert "BROKER_SECRET" not in lines and "HOME" in lines
    kinds = {line.split(" ", 2)[2].split(":")[0] for line in lines if line.startswith("fd ")}
    assert {kind for kind in kinds if not kind.startswith("/proc/")} <= {"/dev/null", "socket", "anon_inode"}
    assert "socket" in kinds
    assert not [line for line in lines if line.endswith("open in the node")]


@pytest.mark.parametrize("open_to_all", [True, False])
def test_its_folder_lies_where_TMPDIR_says_unless_its_user_could_not_reach_it(
    new_host: Callable[..., ProcessHost], monkeypatch: pytest.MonkeyPatch, open_to_all: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755 if open_to_all else 0o700)
        monkeypatch.setenv("TMPDIR", folder)
        expected = folder if open_to_all or os.geteuid() else "/tmp"
        assert os.path.dirname(asyncio.run(asked(new_host(), "os:getcwd"))) == expected


def test_an_episode_without_a_temporary_folder_fails_with_that_reason(
    new_host: Callable[..., ProcessHost], modules: tuple[str, str], tmp_path: Path
) -> None:
    module = tmp_path / "full.py"
    module.write_text(
        "import tempfile\ndef full(*_, **__): raise OSError(28, 'No space left')\ntempfile.mkdtemp = full\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
        (sample,) = play(new_host((*modules, "full")), "plain")
    assert (sample.stop_reason, sample.error) == (
        "environment_killed",
        "reset: no temporary folder: [Errno 28] No space left",
    )


async def asked(host: ProcessHost, path: str) -> Any:
    """The answer of a function without arguments, in a process of its own."""
    channel = await host.open(LIMITS, LIMIT_S)
    with contextlib.closing(channel._writer):
        return await channel.ask(1 << 20, do="call", path=path, keywords={})


@pytest.mark.parametrize(("how", "prompt"), [("talk", "hi False []"), ("token_array", "go")])
def test_an_observation_crosses_whole(host: ProcessHost, how: str, prompt: str) -> None:
    class Template(CharacterTokenizer):
        chat_template = "some"

        def apply_chat_template(self, messages: Any, **options: Any) -> str:
            return f"{messages[0]['content']} {options['enable_thinking']} {options['tools']}"

    (sample,) = play(host, how, tokenizer=Template())
    assert (sample.error, text_of(sample, 0)) == (None, prompt)


@pytest.mark.parametrize(
    ("how", "reason", "why"),
    [
        ("raise", "environment_error", "step raised RuntimeError: not today"),
        ("dicts", "environment_error", "{'role': 'user', 'content': 'hi'}"),
        ("half_a_token", "environment_error", "a token id must be an integer, found 2.7"),
        ("exit", "environment_error", "step raised SystemExit"),
        ("eat", "environment_error", "MemoryError"),
        ("fill_disk", "environment_error", "OSError"),
        ("flood", "environment_flood", "the limit is"),
        ("spin", "environment_killed", "CPU time"),
        ("flood_stdout", "environment_killed", "CPU time"),
        ("crash", "environment_killed", "SIGSEGV"),
        ("fork_bomb", "environment_killed", "more than 64 processes"),
        ("fork_and_leave", "environment_killed", "exit code 0"),
        ("sleep", "environment_timeout", "longer than 1.5 s"),
    ],
)
def test_what_goes_wrong_there_fails_the_sample_with_its_reason_and_leaves_no_process(
    host: ProcessHost, how: str, reason: str, why: str
) -> None:
    (sample,) = play(host, how)
    assert (sample.stop_reason, why in str(sample.error)) == (reason, True), sample.error
    until(lambda: len(left_over()) == 1, "only the fork server stays")
    assert play(host, "plain")[0].error is None


@pytest.mark.parametrize("how", ["fork_bomb", "fork_and_leave", "spin"])
@pytest.mark.slow
def test_where_the_kernel_allows_no_namespaces_everything_ends_too(
    host: ProcessHost, modules: tuple[str, str], new_host: Callable[..., ProcessHost], how: str
) -> None:
    plain = new_host(modules, isolate=False)
    (sample,) = play(plain, how)
    assert sample.stop_reason == "environment_killed", sample.error
    plain.close()
    until(lambda: len(left_over()) <= 1, "only the other tests' fork server stays")


def test_calls_leave_no_zombies_in_a_container_whose_process_1_reaps_none() -> None:
    ended = subprocess.run([sys.executable, "-c", REAPER], capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.stdout == "1\n", ended.stderr


@pytest.mark.parametrize("isolate", [True, False])
async def test_a_process_that_still_writes_leaves_no_folder(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost], isolate: bool
) -> None:
    host, before = new_host(modules, isolate=isolate), len(left_over())
    channels = [await host.open(LIMITS, LIMIT_S) for _ in range(8)]
    folders = [Path(await channel.ask(1000, do="call", path="os:getcwd", keywords={})) for channel in channels]
    call = {"do": "call", "path": "wild_environments:fill_folder", "keywords": {}}
    writing = [asyncio.create_task(channel.ask(1000, **call)) for channel in channels]
    for folder in folders:
        await until_async(lambda folder=folder: (folder / "49").exists(), "a worker that writes")
    for channel, task in zip(channels, writing, strict=True):
        task.cancel()
        channel.close()
    await until_async(lambda: len(left_over()) == before + 1, "only the fork servers stay")
    assert not [folder for folder in folders if folder.exists()]


def test_a_fork_server_that_was_killed_is_replaced(host: ProcessHost) -> None:
    assert play(host, "plain")[0].error is None
    for process in left_over():
        with contextlib.suppress(psutil.NoSuchProcess):  # a child of one that was killed just now
            process.kill()
            process.wait(LIMIT_S)
    assert play(host, "plain")[0].error is None


@pytest.mark.slow
def test_what_the_first_episode_imports_is_imported_once_for_the_later_ones(
    folder: Path, modules: tuple[str, str], new_host: Callable[..., ProcessHost]
) -> None:
    host, log = new_host(modules), folder / "plain_library.imports"
    assert play(host, "plain_library")[0].error is None

    def episode_imports_nothing() -> bool:
        before = log.read_text()
        assert play(host, "plain_library")[0].error is None
        return log.read_text() == before

    until(episode_imports_nothing)
    assert play(host, "spin")[0].stop_reason == "environment_killed"


async def opened(host: ProcessHost, how: str) -> tuple[Channel, psutil.Process]:
    """The first episode of a host, and the host's fork server."""
    before = left_over()
    channel = await host.open(LIMITS, LIMIT_S)
    (server,) = [process for process in left_over() if process not in before and process.info["ppid"] == os.getpid()]
    assert await reset(channel, how)
    return channel, server


async def reset(channel: Channel, how: str) -> Any:
    request = {"path": "wild_environments:Wild", "problem": {"how": how}, "keywords": {"seed": 3, "group_seed": 3}}
    return await channel.ask(1 << 20, do="reset", **request)


async def test_an_episode_that_is_handed_over_while_fork_servers_change_gets_its_process(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    host = new_host(modules)
    first, server = await opened(host, "plain_library")
    server.suspend()
    second = await host.open(LIMITS, LIMIT_S)  # the old server has the request and has not read it
    await host.learn(first)
    await until_async(lambda: "imported in advance" in caplog.text, "the new fork server")
    with contextlib.suppress(psutil.NoSuchProcess):
        server.resume()
    assert await reset(second, "plain_library")
    await until_async(lambda: not server.is_running(), "the end of the old fork server")
    first.close()
    second.close()


@pytest.mark.slow
async def test_a_fork_server_that_is_slow_is_waited_for(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost]
) -> None:
    host = new_host(modules)
    first, server = await opened(host, "plain")
    server.suspend()
    openings = [asyncio.create_task(host.open(LIMITS, LIMIT_S)) for _ in range(320)]
    _, waiting = await asyncio.wait(openings, timeout=2.0)
    assert waiting, "the socket to the fork server is full"
    assert server.is_running() and server.status() == psutil.STATUS_STOPPED
    server.kill()
    first.close()
    for channel in await asyncio.gather(*openings):
        channel.close()


def test_a_library_that_starts_threads_is_left_to_the_episodes(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    host = new_host(modules)
    assert play(host, "threaded_library")[0].error is None
    until(lambda: "modules that start threads are not imported in advance" in caplog.text)
    assert play(host, "threaded_library")[0].error is None


def test_a_host_that_closes_while_it_imports_in_advance_warns_of_nothing(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost], caplog: pytest.LogCaptureFixture
) -> None:
    host = new_host(modules)
    host.close()
    host._warm_up()
    assert not caplog.records


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"modules": ("no_such_environment",)}, ["ModuleNotFoundError", "'no_such_environment'"]),
        ({"python": "/no/such/python"}, ["/no/such/python", os.strerror(errno.ENOENT)]),
    ],
)
def test_processes_that_cannot_be_started_are_the_node_s_fault_and_no_sample_s(
    new_host: Callable[..., ProcessHost], wrong: dict[str, Any], facts: list[str]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with refused(BackendFailed, *facts):
        play(new_host(**wrong), "plain")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_episode_that_is_given_up_while_processes_start_hands_over_no_other_connection(
    folder: Path, modules: tuple[str, str], new_host: Callable[..., ProcessHost]
) -> None:
    (folder / "slow_library.py").write_text("import time; time.sleep(1)\n")
    host, before = new_host((*modules, "slow_library")), len(left_over())

    async def given_up() -> list[tuple[socket.socket, socket.socket]]:
        opening = asyncio.create_task(host.open(LIMITS, LIMIT_S))
        await until_async(lambda: len(left_over()) > before, "the fork server, which starts")
        opening.cancel()
        await asyncio.wait([opening])
        others = [socket.socketpair() for _ in range(4)]  # they would get the numbers that have become free
        (await host.open(LIMITS, LIMIT_S)).close()  # by now the first request was handed over
        return others

    for mine, theirs in asyncio.run(given_up()):
        with mine:
            theirs.close()
            mine.settimeout(LIMIT_S)
            assert mine.recv(1) == b""  # no other process has the other end


async def test_an_episode_that_waits_for_the_model_costs_no_time(
    modules: tuple[str, str], new_host: Callable[..., ProcessHost]
) -> None:
    host, before = new_host(modules), {process.pid for process in left_over()}
    channel = await host.open(LIMITS, LIMIT_S)
    await channel.ask(1000, do="call", path="os:getcwd", keywords={})
    started = [process for process in left_over() if process.pid not in before]
    slept, began = sum(process.num_ctx_switches().voluntary for process in started), time.monotonic()
    await asyncio.sleep(2.0)
    woken = sum(process.num_ctx_switches().voluntary for process in started) - slept
    assert woken <= 5 * (time.monotonic() - began), "twenty times a second before"
    channel.close()


def test_a_python_without_pidfds_watches_its_workers_too() -> None:
    """Some builds lack the function."""
    code = """
import os, socket, time
from rollout_fleet.environments.isolation import fork_server
del os.pidfd_open
here, there = socket.socketpair()
child = os.fork()
if child == 0:
    os._exit(3)
print(fork_server._watch(child, here.fileno(), time.monotonic() + 600, 600.0))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "its process ended with exit code 3\n", done.stderr
