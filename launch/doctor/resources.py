"""Doctor: cores, memory, shared memory, open files and the clock against what the plan needs."""

from common.config.network_checks import is_loopback, split_address
from common.config.schema import Config, SftConfig
from launch.doctor.findings import Finding, fine, judged
from launch.doctor.machine import Machine
from launch.plan.job_plan import Plan
from launch.up.core_pinning import SMALL_MACHINE_CORES, plan_cores

GIB, MIB = 1 << 30, 1 << 20
ROLE_BYTES = 1 << 30  # a process that has imported torch and vLLM or Megatron, before any model
SHM_OF_RANKS = 64 * MIB  # buffers between processes of one machine (NCCL, gloo)
SHM_OF_ENGINE = 256 * MIB  # vLLM's ring buffer between the workers of one engine
FILES, FILES_OF_NODE = 256, 6  # open files of a broker, and of each node at it
FLEET = 64  # nodes that one broker should be able to serve without another thought
EARLIEST_S = 1_735_689_600.0  # 2025


def check_cores(machine: Machine, config: Config | SftConfig | None) -> Finding:
    """Threads of learner and engines have cores of their own."""
    if config is None or machine.gpus:
        return fine("cores", str(machine.cores))
    learner = config.learner.world_size * config.learner.threads
    nodes = [config.rollout.threads] * config.rollout.nodes if isinstance(config, Config) else []
    wanted = learner + sum(nodes)
    if nodes and plan_cores(list(range(machine.cores)), learner, nodes)[0] is not None:
        return fine("cores", f"{machine.cores}: `up` pins learner ({learner}) and engines ({sum(nodes)}) to their own")
    free = " (not pinned on a machine of this size)" if machine.cores > SMALL_MACHINE_CORES else ""
    what = f"{machine.cores} cores for {wanted} threads: {learner} of the learner, {sum(nodes)} of the engines{free}"
    why = "roles that share cores wait for each other, and with OpenMP's barriers for much longer than their share"
    fix = "fewer of learner.world_size, learner.threads, rollout.nodes, rollout.threads, or the roles apart"
    return judged("cores", what, (wanted > machine.cores, "warning", why, fix))


def host_bytes(config: Config | SftConfig, plan: Plan, gpus: bool) -> int:
    """Host memory that `up` needs at least: without GPUs everything, else buffers of weights and offloaded bytes."""
    ranks = config.learner.world_size
    nodes = config.rollout.nodes if isinstance(config, Config) else 0
    needed = (ranks + nodes) * ROLE_BYTES + ranks * plan.fullest.host
    if not gpus:
        needed += ranks * plan.fullest.peak
    if plan.rl is not None and isinstance(config, Config):
        needed += (1 + nodes) * plan.rl.publish.bytes  # the flat buffer of the learner and of every node
        if not gpus:
            cache = (config.rollout.engine.kv_cache_mib or 0) * MIB
            needed += nodes * (plan.rl.engine.weight_bytes * plan.rl.engine.devices + cache)
    return needed


def check_memory(machine: Machine, config: Config | SftConfig | None, plan: Plan | None) -> Finding:
    """The plan fits in memory."""
    has = f"{machine.memory_bytes / GIB:.1f} GiB, {machine.available_bytes / GIB:.1f} available"
    if config is None or plan is None:
        return fine("memory", has)
    needed = host_bytes(config, plan, bool(machine.gpus))
    fix = "fewer nodes, a smaller rollout.engine.kv_cache_mib or learner.micro_batch_tokens; `slipstream plan` has more"
    killed = "the kernel ends the process that asks for too much, mostly the learner"
    return judged(
        "memory",
        f"{needed / GIB:.1f} GiB needed at least, {has}",
        (needed > machine.memory_bytes, "problem", killed, fix),
        (needed > machine.available_bytes, "warning", "other processes use the rest", f"end those, or {fix}"),
    )


def check_shm(machine: Machine, config: Config | SftConfig | None) -> Finding:
    """/dev/shm has room for the buffers that processes of one machine share."""
    needed = 0
    if config is not None and config.learner.world_size > 1:
        needed += config.learner.world_size * SHM_OF_RANKS
    if isinstance(config, Config) and config.rollout.engine.tensor_parallel > 1:
        needed += config.rollout.nodes * SHM_OF_ENGINE
    why = "ranks and engine workers talk through it: they die with a bus error, or hang at their first collective"
    return judged(
        "shm",
        f"/dev/shm has {machine.shm_bytes / MIB:,.0f} MiB" + (f", {needed / MIB:,.0f} needed" if needed else ""),
        (needed > machine.shm_bytes, "problem", why, "docker run --shm-size=8g, or a tmpfs of that size at /dev/shm"),
    )


def check_open_files(machine: Machine, config: Config | SftConfig | None) -> Finding:
    """Enough descriptors for the sockets of a fleet."""
    soft, hard = machine.open_files
    nodes = config.rollout.nodes if isinstance(config, Config) else 0
    fleet = max(nodes, FLEET)
    needed, wanted = (FILES + FILES_OF_NODE * n for n in (nodes, fleet))
    few = f"broker and learner need about {needed:,} for {nodes} nodes; without, nodes cannot connect"
    more = f"a broker of {fleet} nodes needs about {wanted:,}"
    return judged(
        "open files",
        "no limit" if soft < 0 else f"{soft:,} of at most {hard:,}" if hard >= 0 else f"{soft:,}",
        (0 <= soft < needed, "problem", few, f"ulimit -n {max(4096, needed)} (LimitNOFILE of a service)"),
        (0 <= soft < wanted, "warning", more, "ulimit -n 4096 where the broker is started"),
    )


def check_clock(machine: Machine, config: Config | SftConfig | None) -> Finding:
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


def _several_machines(config: Config | SftConfig | None) -> bool:
    if not isinstance(config, Config):
        return False
    try:
        hosts = [split_address(address)[0] for address in config.broker.addresses]
    except ValueError:
        return False
    return any(host and not is_loopback(host) for host in hosts)
