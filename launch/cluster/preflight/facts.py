"""A machine as it introduces itself in a preflight."""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct

from common.config.checks import problems
from common.config.network_checks import is_loopback
from common.config.schema import Config
from common.process.run_dir import RunDir
from common.process.versions import versions
from launch.cluster.interface import Interface, interface_for
from launch.cluster.preflight.links import Target
from launch.doctor.findings import Finding, problem
from launch.doctor.machine import look
from launch.doctor.packages import check_bridge
from launch.doctor.resources import check_disk, check_open_files, check_shm

SETTINGS = ("NCCL_", "GLOO_", "TORCH_NCCL_")
# May always differ.
OWN = ("NCCL_HOSTID", "NCCL_DEBUG", "NCCL_TOPO_FILE", "broker.credentials", "learner.threads", "rollout.threads")
READERS: dict[str, Any] = {"learner": "learner", "rollout": "node", "broker": "broker"}
DISK_BYTES, PIECE, DISK_S = 32 << 20, bytes(4 << 20), 4.0


class Facts(Struct, frozen=True):
    role: str
    interface: Interface
    port: int  # where its Target listens
    token: str
    gpus: int
    agree: dict[str, dict[str, str]]  # by kind and name: must be the same on all machines
    folder: str  # where checkpoints go, or the nearest one above that exists
    writes: dict[str, float]  # bytes per second, by folder
    findings: list[Finding]  # the doctor's


def facts_of(config: Config, role: str, address: str) -> Facts:
    """Looks at this machine for seconds, and listens for tests. Raises UsageError when no way leads to `address`."""
    learner, machine, run = role == "learner", look(), RunDir.of(config)
    interface = interface_for(address, config.learner.interface if learner else None)
    target = Target(interface.address)
    found = [check_shm(machine, config), check_open_files(machine, config), *check_disk(run.path, config, None)]
    found += check_bridge(machine) if learner else ()
    for at in problems(config, READERS[role]):
        found.append(problem("config", str(at), "a launch refuses it there", at.hint or f"set {at.key}"))
    sections = {part: keys for part, keys in msgspec.to_builtins(config).items() if isinstance(keys, dict)}
    keys = {f"{part}.{key}": v for part, keys in sections.items() for key, v in keys.items()}
    mtu = str(psutil.net_if_stats()[interface.name].mtu)
    agree = {
        "config": {key: str(value) for key, value in keys.items() if key not in OWN},
        "versions": versions(),
        "settings": {k: v for k, v in os.environ.items() if k.startswith(SETTINGS) and not k.startswith(OWN)},
        "interface": {"loopback": str(is_loopback(interface.address)), "MTU": mtu},
    }
    if learner and config.learner.interface is None:
        agree["settings"]["network interface"] = interface.name
    folders = [next(at for at in (path, *path.parents) if at.is_dir()) for path in (run.path, run.checkpoints)]
    writes = {str(folder): write_speed(folder) for folder in folders}
    bad = [finding for finding in found if finding.level != "fine"]
    return Facts(role, interface, target.port, target.token, len(machine.gpus), agree, str(folders[-1]), writes, bad)


def write_speed(folder: Path) -> float:
    """Bytes per second that are written and synced, over DISK_BYTES or DISK_S; 0 when nothing can be written."""
    count, begun = 0, time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # has no name: nothing can stay behind
            while count < DISK_BYTES and time.perf_counter() - begun < DISK_S:
                count += file.write(PIECE)
                os.fsync(file.fileno())
    except OSError:
        return 0.0
    return count / (time.perf_counter() - begun)
