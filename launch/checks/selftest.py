"""slipstream selftest: the repository's tests on this machine's devices, with their figures.

Each item is a choice of the tests, which run in a process of their own.

Without a GPU the tests run on the CPU, and what needs a GPU does not apply. Other versions than the pinned ones are
reported, and used. Exit codes: 0 nothing failed, 1 something failed or was not reached, 2 bad usage.
"""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import msgspec
import psutil
from rich.console import Console

from common.config.parallel_layout import PLAIN
from common.errors import EXIT_DONE, EXIT_FAILED, UsageError, nearest
from common.process.install import SOURCES
from common.process.logs import last_lines
from common.process.versions import versions
from launch.checks.findings import Level, show_line
from launch.checks.machine import Machine, look, pins_of
from launch.up.devices import interpreter

PARITY = "tests/integration/megatron/test_megatron_parity.py"
RESUME = "tests/integration/learner/test_resume.py"
# read by tests/rigs/device.py and the test of the quickstart
RANKS = "SLIPSTREAM_TEST_RANKS"
STEPS = "SLIPSTREAM_TEST_STEPS"
PACE = "SLIPSTREAM_TEST_PACE"
ENGINE_LOG = "VLLM_LOGGING_LEVEL"
FEWEST_RANKS = 2  # Layouts have so many ranks, which share a GPU where there are fewer.
MOST_RANKS = 8
SUMS = 20_000  # A layout needs about 1,000 collectives, and about 15 layouts have two ranks.
CPU_SLOWER = 10.0
JOINED_S = 15.0  # Limits are for a GPU on which two processes meet within this time.
END_S = 30.0  # for an item's processes to end
FIND = "import sys; from importlib.util import find_spec as f; print(', '.join(n for n in sys.argv[1:] if not f(n)))"
MOST_CHARACTERS = 2000  # A failed test's report is cut to its end.
LOG_LINES = 15  # A log of an item that ran too long is cut to its end.
State = Literal["passed", "failed", "not applicable"]
LEVELS: dict[State, Level] = {"passed": "fine", "failed": "problem", "not applicable": "skipped"}


@dataclass(frozen=True)
class Item:
    """`tests` are arguments of pytest; they run in the environment of `role`, where it has the packages."""

    name: str
    title: str
    tests: tuple[str, ...]
    packages: tuple[str, ...]  # top-level modules
    role: str = "learner"
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 180.0  # on a GPU, without its sums
    sums: int = 0  # collectives one after another, which are slow where ranks share a GPU
    cuda: bool = False  # it says nothing on a CPU


def items(machine: Machine) -> tuple[Item, ...]:
    """In their order. On a GPU the whole job runs first, so that no other item takes its time."""
    ranks = str(min(MOST_RANKS, max(FEWEST_RANKS, len(machine.gpus))))
    megatron = ("torch", "megatron")
    engine = ("torch", "vllm")
    weights = ("tests/contract/test_weight_transports.py", *(["-k", "nccl"] if machine.gpus else []))
    killed = (RESUME, "-k", "killed_with_9_at_any_moment")
    flips = ("tests/integration/test_engine_weights.py",)
    job = Item(
        "quickstart",
        "40 steps of the quickstart",
        ("tests/integration/jobs/test_quickstart.py",),
        engine,
        role="rollout",
        env={STEPS: "40", ENGINE_LOG: os.environ.get(ENGINE_LOG, "INFO")},
        limit_s=450,  # Where nothing is cached, vLLM compiles kernels for minutes.
    )
    parts = (
        Item("parity", "Megatron against Hugging Face, float32 and bfloat16", (PARITY,), megatron, env={RANKS: "1"}),
        Item(
            "layouts",
            f"the same on up to {ranks} ranks",
            (PARITY,),
            megatron,
            env={RANKS: ranks},
            limit_s=240,
            sums=SUMS,
        ),
        Item(
            "plain",
            "the same without Transformer Engine",
            (PARITY,),
            (*megatron, "transformer_engine"),
            env={RANKS: "1", PLAIN: "1"},
            cuda=True,
        ),
        Item("checkpoint", "saved, killed with -9, resumed", killed, megatron, limit_s=240),
        Item("weights", "weight transports and their faults", weights, ("torch",)),
        Item("engine", "vLLM: labels, flips, canary, read-back", flips, engine, "rollout"),
    )
    return (job, *parts) if machine.gpus else (*parts, job)


class Result(msgspec.Struct):
    name: str
    title: str
    state: State
    why: str = ""  # the reason, unless it passed
    seconds: float = 0.0
    tests: dict[str, int] = {}  # passed, failed, skipped
    skipped: dict[str, int] = {}  # by reason
    figures: dict[str, str] = {}


@dataclass(frozen=True)
class Pace:
    """How slow the devices are, from which limits follow."""

    slower: float  # than the device that the limits are for
    sum_s: float = 0.0  # that one collective takes
    told: str = ""
    measured: str = ""  # the line that tests/rigs/device.py has printed

    def limit_s(self, item: Item) -> float:
        return item.limit_s * self.slower + item.sums * self.sum_s


def command(args: argparse.Namespace) -> int:
    if not (SOURCES / "tests").is_dir() or not (SOURCES / "requirements").is_dir():
        raise UsageError(f"the selftest runs the repository's tests, and {SOURCES} is no checkout; run it in a clone")
    machine = look()
    known = {item.name: item for item in items(machine)}
    for name in args.only or ():
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"--only: expected {', '.join(known)}, found {name}" + f"; nearest: {near}" * bool(near))
    if args.minutes <= 0:
        raise UsageError(f"--minutes: expected a positive number, found {args.minutes:g}")
    pace = measure(machine)
    console = Console(stderr=args.json)
    sums_s = sum(known[name].sums for name in args.only or known) * pace.sum_s
    end = time.monotonic() + args.minutes * 60 * pace.slower + sums_s
    results = [environment(machine)]
    results[0].figures |= {"pace": pace.told} if pace.told else {}
    show(console, results[0])
    for name in args.only or known:
        results.append(run(known[name], machine, pace, end - time.monotonic()))
        show(console, results[-1])
    failed = [result.name for result in results if result.state == "failed"]
    if args.json:
        print(msgspec.json.encode({"passed": not failed, "items": results}).decode())
    console.print(f"selftest: {', '.join(failed) or 'nothing'} failed")
    return EXIT_FAILED if failed else EXIT_DONE


def measure(machine: Machine) -> Pace:
    """Let two processes meet on the machine's GPUs; a CPU has a pace of its own."""
    if not machine.gpus:
        return Pace(CPU_SLOWER)
    _, python = interpreter("learner")
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    probe = subprocess.run([python, "-m", "tests.rigs.device"], cwd=SOURCES, env=env, capture_output=True, text=True)
    said = [*probe.stderr.splitlines(), *probe.stdout.splitlines()][-1:]
    if probe.returncode or not said:
        return Pace(1.0, told=f"unknown, for two processes did not meet on the GPU: {''.join(said)}")
    found = msgspec.json.decode(said[0], type=dict[str, float])
    joined_s = found["joined_s"]
    sum_s = found["reduced_s"]
    told = f"two new processes meet in {joined_s:.1f} s, a sum takes {sum_s * 1000:.2f} ms"
    return Pace(max(1.0, joined_s / JOINED_S), sum_s, told, said[0])


def environment(machine: Machine) -> Result:
    """Versions of each role's environment beside the pinned ones, and the devices. It never fails."""
    figures = {"devices": ", ".join(machine.gpus) or f"no GPU, {machine.cores} cores"}
    for role in ("learner", "rollout"):
        prefix, python = interpreter(role)
        own = role if machine.gpus else "cpu"
        pins = {name.removesuffix("-cpu"): version for name, version in pins_of(own).items()}
        sites = list(prefix.glob("lib/python3*/site-packages")) if prefix else [None]
        found = versions(sites[0] if sites else None)
        other = {n: f" (pinned: {pins[n]})" for n, v in found.items() if pins.get(n, v) not in (v, v.split("+")[0])}
        said = (f"{name} {version}{other.get(name, '')}" for name, version in found.items() if version)
        figures[f"{role} ({python.removeprefix(f'{SOURCES}{os.sep}')})"] = ", ".join(said)
    return Result("environment", "devices and versions", "passed", figures=figures)


def run(item: Item, machine: Machine, pace: Pace, left_s: float) -> Result:
    """Run one item within `left_s`, and its own limit."""
    _, python = interpreter(item.role)
    result = Result(item.name, item.title, "not applicable")
    missing = subprocess.run(
        [python, "-c", FIND, *item.packages], capture_output=True, text=True, cwd=SOURCES
    ).stdout.strip()
    limit_s = min(pace.limit_s(item), left_s)
    if item.cuda and not machine.gpus:
        result.why = "no GPU"
    elif missing:
        result.why = f"{python} has no {missing}"
    elif limit_s <= 0:
        result.state = "failed"
        result.why = "no time was left (--minutes)"
    else:
        with tempfile.TemporaryDirectory(prefix="slipstream-selftest-") as folder:
            began = time.monotonic()
            ended = _pytest(item, python, Path(folder), limit_s, pace)
            result.seconds = round(time.monotonic() - began, 1)
            _read(result, Path(folder), ended, limit_s)
    return result


def _pytest(item: Item, python: str, folder: Path, limit_s: float, pace: Pace) -> int | None:
    """Run the tests; pytest's exit code, or None when they were ended after `limit_s`.

    A warning of other versions than the pinned ones is no failure.
    """
    files = [f"--junitxml={folder / 'results.xml'}", f"--basetemp={folder / 'tests'}"]
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    command = [python, "-m", "pytest", *options, *files, *item.tests]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES), **item.env}
    env |= {PACE: pace.measured} if pace.measured else {}
    with (folder / "output").open("wb") as log:
        child = psutil.Popen(
            command, cwd=SOURCES, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
        )
        try:
            return child.wait(limit_s)
        except psutil.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: psutil.Popen) -> None:
    """End tests that still run, with every process that they started."""
    if not child.is_running():
        return
    started = child.children(recursive=True)
    child.send_signal(signal.SIGINT)  # pytest then ends its fixtures
    with suppress(psutil.TimeoutExpired):
        child.wait(END_S)
    for process in (child, *started):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([child, *started], END_S)


def _read(result: Result, folder: Path, ended: int | None, limit_s: float) -> None:
    file = folder / "results.xml"
    tests = Counter[str]()
    skipped = Counter[str]()
    reports: list[str] = []
    for case in ElementTree.parse(file).iter("testcase") if file.exists() else ():
        bad = [part for part in case if part.tag in ("failure", "error")]
        skips = [part.get("message", "") for part in case if part.tag == "skipped"]
        tests["failed" if bad else "skipped" if skips else "passed"] += 1
        skipped.update(skips)
        reports += [f"{case.get('name')}: {(part.text or '')[-MOST_CHARACTERS:]}" for part in bad]
        result.figures |= {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
    result.tests = dict(tests)
    result.skipped = dict(skipped)
    result.state = "passed" if ended == 0 and tests["passed"] else "failed"
    if result.state == "failed":
        output = (folder / "output").read_text(errors="replace")[-MOST_CHARACTERS:]
        late = f"ended after {limit_s:.0f} s\n" if ended is None else ""
        result.why = late + (reports[0] if reports else output)
        if late:
            result.why += ends_of_logs(folder)


def ends_of_logs(folder: Path) -> str:
    """The last lines of each log under this folder, which say how far the roles of a job came."""
    logs = sorted(folder.glob("**/*.log"))
    return "".join("\n".join(["", f"{log.relative_to(folder)}:", *last_lines(log, LOG_LINES)]) for log in logs)


def show(console: Console, result: Result) -> None:
    """The item in a line, with its figures, and the reason of anything but a success below."""
    counts = ", ".join(f"{n} {what}" for what, n in result.tests.items() if n)
    told = f"{result.title}: {result.state}" + f" ({counts}, {result.seconds:.0f} s)" * bool(counts)
    lines = [f"{name}: {value}" for name, value in result.figures.items()]
    lines += [f"skipped {n}: {why}" for why, n in result.skipped.items()]
    show_line(console, LEVELS[result.state], result.name, told, [*lines, *result.why.splitlines()])
