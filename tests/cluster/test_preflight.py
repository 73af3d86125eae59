"""`slipstream preflight` on hosts: what the verdict names, and that nothing hangs or stays behind."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from common.security.credentials import KeyFolder
from launch.checks.preflight.stages import REDUCE_S
from launch.keys import make
from tests.rigs.configs import write_job
from tests.rigs.hosts import Host, hosts
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until

PORT = 5577
RATE = "200mbit"  # a limit that a busy machine reaches too
ESTABLISHED = "01"
# On h2 torch is imported so late that the others would give up, if they waited for it in the all-reduce.
LATE = f"""
import socket, sys, time

class Late:
    def find_spec(self, name, *_):
        if name == "torch" and socket.gethostname() == "h2":
            time.sleep({REDUCE_S + 1})

sys.meta_path.insert(0, Late())
"""


def job(folder: Path, run: str = "run") -> Path:
    make(KeyFolder(folder / "keys"), ["node-0"])
    broker = {"address": f"tcp://h1:{PORT}", "credentials": str(folder / "keys")}
    return write_job(folder, run={"dir": str(folder / run)}, broker=broker)


def start(
    machines: Sequence[Host], config: Path, *words: str, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    line = ("preflight", str(config), "--machines", "3", *words)
    return [host.slipstream(*line, log=config.parent / host.name, env=env) for host in machines]


def codes(running: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(LIMIT_S) for process in running]


def nothing_stays(machines: Sequence[Host], folder: Path) -> bool:
    processes = [process for host in machines for process in host.processes("preflight")]
    return not processes and not [*folder.rglob(".preflight-*"), *folder.rglob(".doctor-*")]


def is_tested(host: Host) -> bool:
    """Whether a link is: it has a connection that is not the one to the meeting host."""
    lines = [line.split() for line in Path(f"/proc/{host.pid}/net/tcp").read_text().splitlines()[1:]]
    ports = [{int(end.partition(":")[2], 16) for end in line[1:3]} for line in lines if line[3] == ESTABLISHED]
    return any(PORT not in pair for pair in ports)


def test_what_is_wrong_is_named_on_every_machine_and_all_is_well_when_it_is_repaired(tmp_path: Path) -> None:
    with hosts(tmp_path, 3) as machines:
        for host in machines:
            host.slow(RATE)
        machines[2].slow("40mbit")
        config = job(tmp_path, run="private/run")
        running = [*start(machines[:2], config), *start(machines[2:], config, env={"NCCL_ALGO": "Ring"})]
        assert codes(running) == [1, 1, 1]
        page = (tmp_path / "h1").read_text()
        for said in ("h1 to h3: ", "h2 to h3: "):
            assert f"✗ links: {said}" in page
        assert "links: h3" not in page.replace("✓", "")
        assert "NCCL_ALGO: none on h1, h2; Ring on h3" in page
        assert f"in {tmp_path / 'private'} is" in page and "h2, h3" in page, page
        assert "4 to repair" in (tmp_path / "h2").read_text()

        machines[2].slow(RATE)
        (tmp_path / "sitecustomize.py").write_text(LATE)
        repaired = start(machines, job(tmp_path), env={"PYTHONPATH": f"{ROOT}:{tmp_path}"})  # on a port used before
        assert codes(repaired) == [0, 0, 0], (tmp_path / "h1").read_text()
        page = (tmp_path / "h1").read_text().removeprefix(page)
        assert f"at tcp://10.77.0.11:{PORT}: all well" in page
        assert "links: 6" in page
        assert "all-reduce: right" in page
        assert f"{tmp_path} is shared" in page
        assert (tmp_path / "h3").read_text().count("all well") == 1
        assert nothing_stays(machines, tmp_path)


@pytest.mark.parametrize("fault", [Host.cut, Host.kill])
def test_a_machine_that_is_lost_is_named_and_the_others_go_on(tmp_path: Path, fault: Callable[[Host], None]) -> None:
    with hosts(tmp_path, 3) as machines:
        for host in machines:
            host.slow(RATE)
        running = start(machines, job(tmp_path))
        until(lambda: is_tested(machines[2]), "a link of h3 is tested")
        fault(machines[2])
        assert codes(running[:2]) == [1, 1]
        assert codes(running[2:]) != [0]
        for name in ("h1", "h2"):
            page = (tmp_path / name).read_text()
            [found] = [line for line in page.splitlines() if " to repair; " in line]
            # A busy machine may find more, as a slow link between the others.
            assert re.findall(r"machine: (h\d)", found) == ["h3"], page
        assert "all-reduce: right on 2 machines" in (tmp_path / "h1").read_text()
        if fault is Host.cut:
            assert "is silent" in (tmp_path / "h3").read_text()
        assert nothing_stays(machines[:2], tmp_path)


def test_a_machine_that_is_missing_ends_the_wait_with_the_names_of_the_others(tmp_path: Path) -> None:
    with hosts(tmp_path, 3) as machines:
        config = job(tmp_path)
        make(KeyFolder(tmp_path / "other-keys"), ["node-0"])
        stranger = (f"broker.credentials={tmp_path / 'other-keys'}", "--wait-s", "60")
        running = [*start(machines[:2], config, "--wait-s", "30"), *start(machines[2:], config, *stranger)]
        assert codes(running) == [2, 2, 2]
        assert "this key" in (tmp_path / "h3").read_text()
        for name in ("h1", "h2"):
            assert "2 of 3 machines came within 30 s: h1, h2" in (tmp_path / name).read_text()
        assert codes(start(machines[2:], config, "--wait-s", "1")) == [2]
        assert f"listens at tcp://10.77.0.11:{PORT}" in (tmp_path / "h3").read_text()
        assert nothing_stays(machines, tmp_path)
