"""Doctor: cores, memory, shared memory, open files, the clock and the disk of the run against what the plan needs."""

import fcntl
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.config.network_checks import is_loopback, split_address
from common.config.schema import BaseConfig
from common.process.files import sync
from launch.doctor.findings import Finding, fine, judged, problem, warning
from launch.doctor.machine import Machine
from launch.plan.job_plan import GIB, MIB, Plan
from launch.up.devices import SMALL_MACHINE_CORES, plan_cores

ROLE_BYTES = GIB  # a process that has imported torch and vLLM or Megatron, before any model
SHM_OF_RANKS = 64 * MIB  # buffers between processes of one machine (NCCL, gloo)
SHM_OF_ENGINE = 256 * MIB  # vLLM's ring buffer between the workers of one engine
FILES, FILES_OF_NODE = 256, 6  # open files of a broker, and of each node at it
FLEET = 64  # nodes that one broker should be able to serve without another thought
EARLIEST_S = 1_735_689_600.0  # 2025
VOLATILE = ("tmpfs", "ramfs")
SLOW_SYNC_S = 0.05
LOGS_BYTES = 256 * MIB  # logs, metrics, the ledger
SYNCS = 5
LOCAL = "run.dir=FOLDER on a local file system"


def check_cores(machine: Machine, config: BaseConfig | None) -> Finding:
    """Threads of learner and engines have cores of their own."""
    if config is None or machine.gpus:
        return fine("cores", str(machine.cores))
    learner = config.learner.world_size * config.learner.threads
    nodes = [config.rl.rollout.threads] * config.rl.rollout.nodes if config.rl else []
    wanted = learner + sum(nodes)
    if nodes and plan_cores(list(range(machine.cores)), learner, nodes)[0] is not None:
        return fine("cores", f"{machine.cores}: `up` pins learner ({learner}) and engines ({sum(nodes)}) to their own")
    free = " (not pinned on a machine of this size)" if machine.cores > SMALL_MACHINE_CORES else ""
    what = f"{machine.cores} cores for {wanted} threads: {learner} of the learner, {sum(nodes)} of the engines{free}"
    why = "roles that share cores wait for each other, and with OpenMP's barriers for much longer than their share"
    fix = "fewer of learner.world_size, learner.threads, rollout.nodes, rollout.threads, or the roles apart"
    return judged("cores", what, (wanted > machine.cores, "warning", why, fix))


def check_memory(machine: Machine, config: BaseConfig | None, plan: Plan | None) -> Finding:
    """`up` needs at least this much: without GPUs everything, else buffers of weights and offloaded bytes."""
    has = f"{machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} available"
    if config is None or plan is None:
        return fine("memory", has)
    ranks, nodes = config.learner.world_size, config.rollout_nodes
    needed = (ranks + nodes) * ROLE_BYTES + ranks * plan.fullest.host
    if not machine.gpus:
        needed += ranks * plan.fullest.peak
    if plan.rl is not None and config.rl is not None:
        needed += (1 + nodes) * plan.rl.publish.bytes  # the flat buffer of the learner and of every node
        if not machine.gpus:
            cache = (config.rl.rollout.engine.kv_cache_mib or 0) * MIB
            needed += nodes * (plan.rl.engine.weight_bytes * plan.rl.engine.devices + cache)
    fix = "fewer nodes, a smaller rollout.engine.kv_cache_mib or learner.micro_batch_tokens; `slipstream plan` has more"
    killed = "the kernel ends the process that asks for too much, mostly the learner"
    return judged(
        "memory",
        f"{needed / GIB:.1f} GiB needed at least, {has}",
        (needed > machine.memory_bytes, "problem", killed, fix),
        (needed > machine.available_bytes, "warning", "other processes use the rest", f"end those, or {fix}"),
    )


def check_shm(machine: Machine, config: BaseConfig | None) -> Finding:
    """/dev/shm has room for the buffers that processes of one machine share."""
    needed = 0
    if config is not None and config.learner.world_size > 1:
        needed += config.learner.world_size * SHM_OF_RANKS
    if config is not None and config.rl and config.rl.rollout.engine.tensor_parallel > 1:
        needed += config.rollout_nodes * SHM_OF_ENGINE
    why = "ranks and engine workers talk through it: they die with a bus error, or hang at their first collective"
    what = f"/dev/shm has {machine.shm_bytes / MIB:,.0f} MiB" + (f", {needed / MIB:,.0f} needed" if needed else "")
    fix = "docker run --shm-size=8g, or a tmpfs of that size at /dev/shm"
    return judged("shm", what, (needed > machine.shm_bytes, "problem", why, fix))


def check_open_files(machine: Machine, config: BaseConfig | None) -> Finding:
    """Enough descriptors for the sockets of a fleet: broker and learner raise their limit to the hard one."""
    limit = machine.open_files
    nodes = config.rollout_nodes if config is not None else 0
    fleet = max(nodes, FLEET)
    needed, wanted = (FILES + FILES_OF_NODE * n for n in (nodes, fleet))
    few = f"broker and learner need about {needed:,} for {nodes} nodes; without, nodes cannot connect"
    more = f"a broker of {fleet} nodes needs about {wanted:,}"
    return judged(
        "open files",
        "no limit" if limit < 0 else f"{limit:,}",
        (0 <= limit < needed, "problem", few, f"a hard limit of {max(4096, needed)} (LimitNOFILE of a service)"),
        (0 <= limit < wanted, "warning", more, "a hard limit of 4096 where the broker is started"),
    )


def check_clock(machine: Machine, config: BaseConfig | None) -> Finding:
    """The clock is set; leases do not depend on it, ages and TLS certificates do."""
    unset = machine.now_s < EARLIEST_S
    drifts = machine.clock_synchronised is False and _several_machines(config)
    what = f"{machine.now_s:.0f} s since 1970, which is years ago" if unset else "set"
    wrong = "times in events and metrics are wrong, and TLS certificates are not valid yet"
    apart = "machines whose clocks differ show wrong ages; leases use clocks that nobody sets, and are safe"
    return judged(
        "clock",
        "the kernel says that no time server keeps it" if drifts and not unset else what,
        (unset, "problem", wrong, "set it, or start a time server's client"),
        (drifts, "warning", apart, "chrony or systemd-timesyncd"),
    )


def _several_machines(config: BaseConfig | None) -> bool:
    if config is None or config.rl is None:
        return False
    try:
        hosts = [split_address(address)[0] for address in config.broker.addresses]
    except ValueError:
        return False
    return any(host and not is_loopback(host) for host in hosts)


def check_disk(run_dir: Path, config: BaseConfig, plan: Plan | None) -> Iterator[Finding]:
    """Room, and whether a sync reaches the disk and a lock keeps a second broker out."""
    folder = next((path for path in (run_dir, *run_dir.parents) if path.is_dir()), Path("/"))
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "every role writes there"
        yield problem("disk", f"{folder} cannot be written", why, "run.dir=FOLDER elsewhere, or chown it")
        return
    yield _space(folder, config, plan)
    inside = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    kind = max(reversed(inside), key=lambda p: len(p.mountpoint)).fstype if inside else ""
    if kind in VOLATILE:
        why = "checkpoints and groups are gone with the power, whatever broker.durability promises, and take memory"
        yield warning("file system", f"{folder} is on a {kind}", why, "run.dir=FOLDER on a disk")
    yield _sync(folder, config)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        why = "two brokers of one run could write the same store"
        yield problem("locks", f"{folder}: {error.strerror or error}", why, LOCAL)


def _space(folder: Path, config: BaseConfig, plan: Plan | None) -> Finding:
    """Room for checkpoints, the final model, and the broker's groups, all of full length."""
    free, needed = shutil.disk_usage(folder).free, LOGS_BYTES
    if plan is not None:
        weights = plan.rl.publish.bytes if plan.rl is not None else plan.parameters * 4
        needed += plan.checkpoint.bytes * plan.checkpoint.kept + weights
        if (job := config.rl) is not None and plan.rl is not None and job.broker.store == "file":
            step = job.learner.groups_per_step * plan.rl.window.group_bytes
            steps = job.broker.retain_steps + job.learner.checkpoint.every + job.staleness.max + 1
            needed += min(steps * step, 2 * job.broker.max_bytes)
    why = "on a full disk the broker acknowledges nothing and checkpoints fail"
    fix = "run.dir=FOLDER on a larger disk, or a smaller learner.checkpoint.keep or broker.retain_steps"
    what = f"{free / GIB:.1f} GiB free under {folder}, up to {needed / GIB:.1f} needed"
    return judged("disk", what, (free < needed / 2, "problem", why, fix), (free < needed, "warning", why, fix))


def _sync(folder: Path, config: BaseConfig) -> Finding:
    """The median time of one append and fsync, where fsync of a file and of its folder works."""
    taken: list[float] = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            for _ in range(SYNCS):
                file.write(b"x" * 4096)
                file.flush()
                began = time.perf_counter()
                os.fsync(file.fileno())
                taken.append(time.perf_counter() - began)
            sync(folder)
    except OSError as error:
        why = "neither checkpoints nor the broker's promises would be on the disk when they say so"
        return problem("fsync", f"{folder}: {error.strerror or error}", why, LOCAL)
    waits = config.rl is not None and config.rl.broker.durability == "fsync"
    seconds = statistics.median(taken)
    why = "each promise of the broker waits for one, so groups take longer to be ready"
    fix = "run.dir on a faster disk, or broker.durability=everysec (docs/delivery.md says what that costs)"
    return judged("fsync", f"{seconds * 1e3:.1f} ms", (seconds > SLOW_SYNC_S and waits, "warning", why, fix))
