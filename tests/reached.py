"""Runs pytest in a fork, so that libraries are imported once, and notes which test runs which lines."""

import hashlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

FAST = ("tests/unit", "tests/property", "tests/contract")
OURS = ("common", "broker", "learner", "rollout_fleet", "launch", "tests", "bench")


class Reached:
    """Pytest plugin: runs the `chosen` tests in their order, or all; notes the lines of `traced` that they run.

    `chosen` has the seconds after which a test that has not ended kills its process.
    """

    def __init__(self, chosen: dict[str, int] | None, traced: tuple[str, ...]) -> None:
        self.chosen, self.traced, self.root = chosen, traced, os.getcwd()
        self.names: dict[str, str | None] = {}
        self.now: set[str] = set()
        self.tests: dict[str, dict[str, Any]] = {}
        self.shared: dict[str, set[str]] = {}  # lines that the fixtures of a file run
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (chosen := self.chosen) is not None:
            found = {item.nodeid: item for item in items}
            items[:] = [found[test] for test in chosen if test in found]

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if path not in self.names:
            here = os.path.relpath(path, self.root) if path.startswith(self.root) else ""
            self.names[path] = here if here.startswith(self.traced) else None
        if (name := self.names[path]) is None:
            return None
        self.now.add(f"{name}:{frame.f_lineno}")
        return self.trace

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.now, begun = set(), time.perf_counter()
        if self.traced:
            threading.settrace(self.trace)
            sys.settrace(self.trace)
        signal.alarm(self.chosen[item.nodeid] if self.chosen else 0)
        yield
        signal.alarm(0)
        sys.settrace(None)
        self.tests[item.nodeid] = {"s": round(time.perf_counter() - begun, 2), "lines": sorted(self.now)}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        before = set(self.now)
        yield
        if fixturedef.scope != "function":
            self.shared.setdefault(request.node.nodeid.split("::")[0], set()).update(self.now - before)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed += [report.nodeid] * report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed += [report.nodeid] * report.failed


def run(
    arguments: list[str], *, timeout_s: float, chosen: dict[str, int] | None = None, traced: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Run pytest in a fork, in the current folder; returns {'failed', 'tests', 'shared'}, {} when it did not end."""
    found = Path("found.json").resolve()
    found.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        with open("output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        plugin, code = Reached(chosen, traced), 3
        try:
            code = pytest.main([*arguments, "-q", "-m", "not slow", "-p", "no:cacheprovider"], plugins=[plugin])
            shared = {name: sorted(lines) for name, lines in plugin.shared.items()}
            broken = ["collection"] * (code not in (0, 1) and not plugin.failed)
            found.write_text(json.dumps({"failed": plugin.failed + broken, "tests": plugin.tests, "shared": shared}))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    until = time.monotonic() + timeout_s
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.05)
    for orphan in psutil.Process().children(recursive=True):  # children of dead children come to this process
        orphan.kill()
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return json.loads(found.read_text()) if found.exists() else {}


def reached(packages: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """{test: {"s": seconds, "lines": ["path:line"]}} of the fast tests that pass; folder/map.json has known ones."""
    code = hashlib.sha256()
    for path in sorted(path for package in packages for path in Path(package.split("/")[0]).rglob("*.py")):
        code.update(path.read_bytes())
    files = [path for part in FAST for path in Path(part).rglob("test_*.py")]
    hashes = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    known = json.loads((folder / "map.json").read_text()) if (folder / "map.json").exists() else {}
    known = known if known.get("code") == code.hexdigest() else {"code": code.hexdigest(), "files": {}, "tests": {}}
    new = sorted(name for name, digest in hashes.items() if known["files"].get(name) != digest)
    known["tests"] = {t: about for t, about in known["tests"].items() if t.split("::")[0] in hashes.keys() - set(new)}
    for begin in range(0, len(new), 20):
        part = new[begin : begin + 20]
        found = run(part, timeout_s=3600, traced=packages)
        for test, about in found["tests"].items():
            if test not in found["failed"]:
                lines = {*about["lines"], *found["shared"].get(test.split("::")[0], [])}
                known["tests"][test] = {"s": about["s"], "lines": sorted(lines)}
        known["files"] |= {name: hashes[name] for name in part}
        (folder / "map.json").write_text(json.dumps(known))
        print(f"{begin + len(part)} of {len(new)} test files mapped; failed: {found['failed'] or 'none'}", flush=True)
    return known["tests"]
