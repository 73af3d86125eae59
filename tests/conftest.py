"""The order of the test files, which of them `launch/test.sh fast` leaves out, and how `async def` tests run.

The workers of pytest-xdist take whole files in this order, the longest first, so that none is left for the end.
"""

import asyncio
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rigs.hosts import missing
from tests.rigs.waiting import LIMIT_S

with suppress(ImportError):  # the tests that `slipstream selftest` runs need no hypothesis
    from hypothesis import settings

    settings.register_profile("slow machines", deadline=None)  # an example may wait for a busy core
    settings.load_profile("slow machines")

ROOT = Path(__file__).resolve().parent
FOLDERS = ["cluster", "integration", "faults", "contract", "property", "unit"]  # from long to short
LONGEST_FILES = [
    *("test_machine_faults.py", "test_weight_hosts.py", "test_slurm_run.py", "test_slurm_jobs.py"),
    *("test_faults.py", "test_end_to_end.py", "test_megatron_parity.py", "test_experts.py", "test_deadlines.py"),
    *("test_mixed_fleet.py", "test_miniatures.py", "test_architectures.py", "test_checkpoints.py", "test_memory.py"),
    *("test_engine_flips.py", "test_engine_weights.py", "test_engine_experts.py", "test_resume.py"),
    *("test_replay.py", "test_client_job.py", "test_sft_resume.py"),
]
SLOW_FOLDERS = {"cluster", "integration", "faults", "learner_megatron"}
SLOW_FILES = {  # they start processes, wait for links, plan for many devices, or draw pages with matplotlib
    *("test_adapters.py", "test_built_in_environments.py", "test_cli.py", "test_comparison.py", "test_credentials.py"),
    *("test_durable_server.py", "test_long_ledger.py", "test_plan.py", "test_quickstart.py", "test_rendezvous.py"),
    *("test_report.py", "test_scale.py", "test_selftest.py", "test_slow_links.py", "test_weight_transports.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by folder, and mark the slow ones and those that need hosts of their own."""
    for item in items:
        if item.path.is_relative_to(ROOT / "cluster"):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.skipif(missing() != "", reason=missing()))
        if item.path.name in SLOW_FILES or SLOW_FOLDERS & {folder.name for folder in item.path.parents}:
            item.add_marker(pytest.mark.slow)
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[int, int]:
    name, folder = item.path.name, item.path.relative_to(ROOT).parts[0]
    turn = LONGEST_FILES.index(name) if name in LONGEST_FILES else len(LONGEST_FILES)
    return turn, FOLDERS.index(folder)


@pytest.fixture(scope="module", autouse=True)
def kept_environment() -> Iterator[None]:
    """An engine sets HF_HUB_OFFLINE, and a role its log level; what one file sets does not reach the next."""
    before, level = dict(os.environ), logging.root.level
    yield
    logging.root.setLevel(level)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in an event loop of its own, with a limit."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), LIMIT_S))
    return True


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failed test at once: a run that is cut off never reaches pytest's summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = report.longreprtext.strip().splitlines()[-12:]
        print(f"\n{report.nodeid} failed ({report.when}, {report.duration:.0f} s):", *reason, sep="\n    ", flush=True)
