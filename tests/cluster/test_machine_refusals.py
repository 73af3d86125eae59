"""Machines that do not fit together: a launcher ends with exit code 2 or 3 and the reason, and nothing stays."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.hosts import Host, signal_to
from tests.rigs.machines import MachineRig
from tests.rigs.waiting import LIMIT_S, until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[MachineRig]:
    made = MachineRig(tmp_path, 0)
    yield made
    made.close()


def refused(rig: MachineRig, host: Host, *words: str, code: int = 2, **env: str) -> str:
    """The error of a launcher that ends with this code."""
    launcher = rig.launch(host, str(rig.config), *words, **env)
    assert launcher.wait(LIMIT_S) == code, rig.log(host)
    assert not host.processes("launch.cli", "learner")
    return rig.log(host).splitlines()[-1]


def test_a_machine_that_does_not_fit_is_refused_and_the_first_one_waits(rig: MachineRig) -> None:
    one, two, _ = rig.hosts
    assert "tcp://10.77.0.11:5555 within" in refused(rig, two, "--join-timeout-s", "1")
    rig.start_broker()
    first = rig.launch(one)
    until(lambda: "1 of 2 here" in rig.log(one), "the first machine to wait", told=rig.logs)
    found = refused(rig, two, "learner.optimizer.lr=0.5")
    assert "learner.optimizer.lr is" in found
    assert "NCCL_P2P_DISABLE: h3" in refused(rig, two, NCCL_P2P_DISABLE="1")
    found = refused(rig, two, "learner.interface=0.0.0.0")
    assert "learner.interface: expected" in found
    assert "'0.0.0.0'" in found and "eth0" in found
    assert "learner.interface: lo" in refused(rig, two, "learner.interface=lo")
    assert first.poll() is None
    assert len(list(rig.checkpoints.glob(".machine-*"))) == 1, "those of the refused ones are gone"
    signal_to(first, signal.SIGTERM)
    assert first.wait(LIMIT_S) == 0, rig.logs()
    found = refused(rig, two, "learner.machines_wait_s=0.5", code=3)
    assert "(learner.machines_wait_s)" in found


def test_a_folder_of_checkpoints_that_is_not_shared_is_refused_with_its_key(tmp_path: Path) -> None:
    own = str(tmp_path / "private" / "checkpoints")
    rig = MachineRig(tmp_path, 0, learner={"checkpoint": {"dir": own}})
    try:
        rig.start_broker()
        launchers = [rig.launch(host) for host in rig.hosts[:2]]
        assert [launcher.wait(LIMIT_S) for launcher in launchers] == [2, 2], rig.logs()
        assert f"learner.checkpoint.dir: {own} on" in rig.logs()
    finally:
        rig.close()
