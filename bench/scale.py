"""A job on paper, up to 10,000 nodes and 64 learner machines: the load of each part, lost time, and what breaks first.

    python bench/scale.py            writes bench/results/scale.json in about a minute

Costs come from other files of bench/results: CONSTANTS names each one. A constant whose result is not there leaves its
part out. Another bench joins with a line in CONSTANTS, and one in `Large.parts` for a new part. A group is encoded
here. A lab's chains of nodes (CHAIN_LAB) calibrate the weights. Every option is an assumption, and so are the speeds of
engines and learner in bench/simulate.py. docs/scale.md says what the model leaves out.

- Broker: CPU for each node that waits, and for each group; both grow in proportion.
- Weights: pieces travel along chains. Each node passes a piece on when it has it, and a few more lie at every node.
- Window: bench/simulate.py with STAND_IN nodes. Each stands for many, and has a version when the last node has it.
- Failures: each machine of the learner fails at a rate of its own. The rest start again from the newest checkpoint.
- Large jobs: by model, length, nodes and machines, the load of each part over the load at which it breaks.
"""

import itertools
import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import broker_groups
import harness
from simulate import FLEET, predict

from bench.figures import RESULTS, result
from broker.delivery.nodes import MOST_NODES
from common.rollouts import encode_group

STAND_IN = 64  # simulated nodes; the pace of more differs little
GROUPS_OF_NODE = 8  # in a step: 64 episodes at once in groups of 8, as in bench/simulate.py
SAMPLES = 8
HEADERS = 1.046  # bytes on the wire over bytes of weights, in the lab
CHAIN_LAB = (  # Mbit/s of each link, KiB of a piece, nodes, and the last one's seconds over size / rate; 24 MiB, CURVE
    (100, 256, 2, 1.08), (100, 256, 4, 1.20), (100, 256, 8, 1.39), (40, 256, 8, 1.25), (40, 128, 8, 1.13),
    (40, 64, 8, 1.11),
)  # fmt: skip
LAB_KIB = 24 << 10
GIB, MIB = 1 << 30, 1 << 20
LOST_LIMIT = 0.1  # share
LEAD_SHARE = 0.1  # of a step, in which the lead rank may plan and send batches
BATCH_TOKENS = 1 << 30  # in the step of `ahead_s` and so on
STATE = 7  # GiB of a checkpoint for one of the model: weights in bfloat16, main weights and two moments in float32
GPUS = 8  # a learner machine has so many
MOST = 1 << 20  # no limit is looked for beyond


def chain_s(size: float, rate: float, piece: float, nodes: int, at_node: float = 1.0, headers: float = 1.0) -> float:
    """Seconds until the last of `nodes` in a chain has `size` bytes, with links of `rate` bytes a second.

    `at_node` pieces of `piece` bytes reach a node before the next one gets the first: 1 when it stores and forwards.
    """
    return headers * piece / rate * (math.ceil(size / piece) + at_node * (nodes - 1))


def pieces_at_node() -> float:
    """The factor that fits the lab best, by least squares."""
    points = [((nodes - 1) * piece / LAB_KIB, times / HEADERS - 1) for _, piece, nodes, times in CHAIN_LAB]
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def chain_check(at_node: float) -> list[dict[str, float]]:
    """The lab's chains beside the model."""
    names = ("Mbit/s", "piece KiB", "nodes", "measured", "model")
    models = (round(chain_s(LAB_KIB, LAB_KIB, piece, n, at_node, HEADERS), 2) for _, piece, n, _ in CHAIN_LAB)
    return [dict(zip(names, (*point, model), strict=True)) for point, model in zip(CHAIN_LAB, models, strict=True)]


@dataclass(frozen=True)
class Cluster:
    """Machines of a learner. All are needed; `spares` more wait. Seconds, and failures of one machine in an hour."""

    machines: int
    spares: int
    failures_per_hour: float
    interval_s: float  # training between checkpoints
    pause_s: float  # training stops so long for each
    durable_s: float  # it counts so much later
    restart_s: float  # from a failure to the next step, with enough machines
    repair_s: float  # until a machine that failed is back

    @property
    def between_s(self) -> float:
        """Mean seconds between failures of any of the machines."""
        return 3600 / (self.machines * self.failures_per_hour)


def lost_share(cluster: Cluster, failures: int, seed: int = 0) -> float:
    """Share of the time that led to no lasting step, over so many failures. A machine that waits never fails."""
    draw = random.Random(seed)
    away: deque[float] = deque()  # when machines that failed are back
    cycle_s = cluster.interval_s + cluster.pause_s
    now = kept_s = 0.0
    for _ in range(failures):
        if len(away) > cluster.spares:
            now = max(now, away[len(away) - cluster.spares - 1])
        while away and away[0] <= now:
            away.popleft()
        life_s = draw.expovariate(1 / cluster.between_s)
        kept_s += cluster.interval_s * max(0, int((life_s - cluster.restart_s - cluster.durable_s) // cycle_s))
        now += life_s
        away.append(now + cluster.repair_s)
    return 1 - kept_s / now


def lost_formula(cluster: Cluster) -> float:
    """The same with as many spares as it takes: the complete model of Daly 2006, with `durable_s` added."""
    mean_s = cluster.between_s
    survives = math.exp(-(cluster.restart_s + cluster.durable_s) / mean_s)
    return 1 - cluster.interval_s / mean_s * survives / math.expm1((cluster.interval_s + cluster.pause_s) / mean_s)


CONSTANTS = {  # name -> a result, and the value's path: fields, indices, and KEY=VALUE for the row that has it
    "node_us": ("broker_scale", "runs/-1/broker_cpu_us_per_node_per_s"),  # broker's CPU for a node that waits, a second
    "group_us": ("broker_scale", "runs/-1/broker_cpu_us_per_group_without_waiting"),  # and for a group of 1k
    "large_group_us": ("broker_window", "runs/way=store/broker_cpu_us_per_group"),  # the same for 8k, from the store
    "snapshot_us": ("broker_window", "snapshots/-1/us_per_group_by_records"),  # for a group's share of snapshots
    "store_mib_per_s": ("broker_window", "runs/way=store/fill_mib_per_s"),  # groups that the store took
    "lead_us": ("broker_overhead", "sizes/1k/ways/slipstream_memory/consumer_us"),  # lead rank's CPU for a group of 1k
    "finished_bytes": ("broker_soak", "growth_bytes_per_group"),  # broker's memory for a finished task
    "sent_s_per_gib": ("weight_cpu", "ways/way=keys/sender_s"),  # a source's CPU for weights, sealed
    "forwarded_s_per_gib": ("weight_cpu", "ways/way=keys to 3/receiver_s"),  # a node's that passes them on
    "ahead_s": ("batch_path", "hosts/case=tokens/ahead_s"),  # lead rank's CPU for a step of 2^30 tokens while it trains
    "prepare_s": ("batch_path", "hosts/case=tokens/prepare_s"),  # and before it trains
    "deliver_s": ("batch_path", "hosts/case=tokens/deliver_s"),
    "copied_s_per_gib": ("checkpoint_stall", "costs/copied_gib_s"),  # a rank's CPU for its part of a checkpoint
    "control_s": ("weight_control", "relay/nodes=1000/publish/cpu_s"),  # lead rank's CPU for a publish to 1,000 nodes
}


def constant(name: str) -> float | None:
    """A measured value of CONSTANTS; None when its result is not there."""
    source, path = CONSTANTS[name]
    if not (RESULTS / f"{source}.json").exists():
        return None
    found: Any = result(source)
    for word in path.split("/"):
        key, _, value = word.partition("=")
        if value:
            found = next(row for row in found if str(row[key]) == value)
        else:
            found = found[int(key) if isinstance(found, list) else key]
    return float(found)


def encoded_bytes(size: str) -> int:
    return len(encode_group(next(broker_groups.structs(size))[0]))


@dataclass(frozen=True)
class Costs:
    """Measured costs; see CONSTANTS."""

    node_us: float
    group_us: float
    lead_us: float
    finished_bytes: float
    token_bytes: float  # in an encoded group

    @staticmethod
    def measured() -> "Costs":
        tokens = SAMPLES * (broker_groups.PROMPT_TOKENS + broker_groups.COMPLETION_TOKENS["1k"])
        runs = result("broker_scale")["runs"]
        return Costs(
            node_us=constant("node_us") or 0.0,
            group_us=max(run["broker_cpu_us_per_group_without_waiting"] for run in runs),  # the dearest run
            lead_us=constant("lead_us") or 0.0,
            finished_bytes=constant("finished_bytes") or 0.0,
            token_bytes=round(encoded_bytes("1k") / tokens, 2),
        )


class Job:
    """A fleet whose step takes what its engines generate at once; `tokens` of a sample, `step_s` of a full fleet."""

    def __init__(self, options: harness.Options, costs: Costs, tokens: float, step_s: float) -> None:
        self._options, self._costs, self._step_s = options, costs, step_s
        self._group_bytes = SAMPLES * tokens * costs.token_bytes
        self._rate = options.link_gbit * 1e9 / 8
        self._at_node = pieces_at_node()

    def load(self, nodes: int) -> dict[str, float]:
        """The work of broker and lead rank; MB/s in and out, and the share of a step for taking groups."""
        costs, groups_per_s = self._costs, nodes * GROUPS_OF_NODE / self._step_s
        return {
            "nodes": nodes,
            "groups_per_s": groups_per_s,
            "broker_cores": 1e-6 * (nodes * costs.node_us + groups_per_s * costs.group_us),
            "broker_mb_per_s": 2e-6 * groups_per_s * self._group_bytes,
            "growth_gib_per_day": 86400 * groups_per_s * costs.finished_bytes / GIB,
            "window_gib": self.window_bytes(nodes, self._options.staleness[-1]) / GIB,
            "lead_share": 1e-6 * groups_per_s * costs.lead_us,
            "failures_per_hour": nodes * self._options.failures_per_hour[-1],
        }

    def window_bytes(self, nodes: int, staleness: int) -> float:
        """All groups that may be outstanding (common/staleness.py)."""
        return nodes * GROUPS_OF_NODE * (staleness + 1) * self._group_bytes

    def publish_s(self, nodes: int, roots: int, piece_mib: float) -> float:
        """Until the last node has a version; each root sends the whole model along its own chain."""
        depth = math.ceil(nodes / roots)
        return chain_s(self._options.model_gib * GIB, self._rate, piece_mib * MIB, depth, self._at_node, HEADERS)

    def window(self, nodes: int, roots: int, piece_mib: float) -> dict[str, Any]:
        """Seconds of a publish, and of a step over those of a fleet that is always full, by `staleness.max`."""
        publish_s = self.publish_s(nodes, roots, piece_mib)
        fleet = replace(FLEET, deliver_s=publish_s)
        found: list[dict[str, Any]] = predict(STAND_IN, self._options.staleness, self._options.steps, fleet=fleet)
        over = {str(f["setup"]["staleness"]): f["asynchronous_step_s"] / f["full_engines_s"] for f in found}
        return {"nodes": nodes, "roots": roots, "piece_mib": piece_mib, "publish_s": publish_s, "over_full": over}

    def cluster(self, machines: int, rate: float) -> Cluster:
        o = self._options
        return Cluster(machines, 0, rate, o.every * self._step_s, o.pause_s, o.durable_s, o.restart_s, o.repair_s)

    def failing(self, machines: int, rate: float) -> dict[str, Any]:
        """Lost time of a learner, by number of spares; and the interval that Young's formula finds best, in steps."""
        plain, failures = self.cluster(machines, rate), self._options.failures
        return {
            "machines": machines,
            "failures_per_hour": rate,
            "between_h": plain.between_s / 3600,
            "lost": {str(n): lost_share(replace(plain, spares=n), failures) for n in self._options.spares},
            "formula": lost_formula(plain),
            "best_every": max(1, round(math.sqrt(2 * plain.pause_s * plain.between_s) / self._step_s)),
        }

    def limits(self) -> list[dict[str, Any]]:
        """Where each part breaks, the smallest fleet first; machines of the learner last."""
        o = self._options
        fleet: list[tuple[str, str, Callable[[int], bool]]] = [
            ("the broker's table of nodes", "`MOST_NODES`", lambda n: n <= MOST_NODES),
            ("one core of the broker", "a second broker", lambda n: self.load(n)["broker_cores"] <= 1),
            ("the broker's link", "a faster one", lambda n: self.load(n)["broker_mb_per_s"] <= self._rate / 1e6),
            ("a tenth of a step for taking groups", "a second reader", lambda n: self.load(n)["lead_share"] <= 0.1),
        ]
        for roots, piece in itertools.product(o.roots, o.piece_mib):
            what = f"a step for a publish: {roots} chain{'s' * (roots > 1)}, pieces of {piece:g} MiB"
            within = lambda n, r=roots, p=piece: self.publish_s(n, r, p) <= self._step_s  # noqa: E731
            fleet.append((what, "more chains, smaller pieces", within))
        found = [{"limit": w, "largest": largest(fits), "of": "nodes", "what moves it": c} for w, c, fits in fleet]
        found.sort(key=lambda row: row["largest"] or MOST)
        for each in o.failures_per_hour:
            most = largest(lambda n, r=each: lost_formula(self.cluster(n, r)) <= LOST_LIMIT)
            what = f"a tenth of the time lost, {each:g} failures/h and machine"
            cure = "a faster restart"
            found.append({"limit": what, "largest": most, "of": "learner machines", "what moves it": cure})
        return found


class Part(NamedTuple):
    """A part of a job: its load over the load at which it breaks, and the constants that say so."""

    name: str
    load: float
    constants: tuple[str, ...] = ()


class Large:
    """A job: GiB of the model, tokens a second of a node and of a sample, and machines of the learner."""

    def __init__(
        self, options: harness.Options, costs: Costs, gib: float, node_tokens_per_s: float, tokens: int, machines: int
    ) -> None:
        self._options, self._costs, self._gib, self._machines = options, costs, gib, machines
        self.node_tokens = GROUPS_OF_NODE * SAMPLES * tokens  # a node's, in a step
        self.step_s = self.node_tokens / node_tokens_per_s  # a step takes what the fleet runs at once
        self.group_bytes = SAMPLES * tokens * costs.token_bytes
        self._known = {name: constant(name) for name in CONSTANTS}

    def _each_us(self, small: str, large: str) -> float:
        """CPU for a group, in a straight line through groups of 1k and of 8k."""
        known, sizes = self._known, [encoded_bytes(size) for size in ("1k", "8k")]
        low, high = known[small] or 0.0, known[large] or 0.0
        return low + (high - low) * (self.group_bytes - sizes[0]) / (sizes[1] - sizes[0])

    def parts(self, nodes: int) -> list[Part]:
        """Every part that a measured constant gives, the fullest first."""
        o, known, step_s = self._options, self._known, self.step_s
        groups_per_s, rate = nodes * GROUPS_OF_NODE / step_s, o.link_gbit * 1e9 / 8
        broker_us = self._each_us("group_us", "large_group_us") + (known["snapshot_us"] or 0.0)
        publish_s = chain_s(self._gib * GIB, rate, o.large_piece_mib * MIB, nodes, pieces_at_node(), HEADERS)
        interval_s, failures = o.every * step_s, o.failures_per_hour[-1]
        cluster = Cluster(self._machines, 0, failures, interval_s, o.pause_s, o.durable_s, o.restart_s, o.repair_s)
        node_us, stored = known["node_us"], known["store_mib_per_s"]
        sent, forwarded, control_s = (known[name] for name in ("sent_s_per_gib", "forwarded_s_per_gib", "control_s"))
        parts = [
            Part("broker's table of nodes", nodes / MOST_NODES),
            Part("broker's link", groups_per_s * self.group_bytes / rate),
            Part("nodes' links, for a publish", publish_s / step_s),
            Part("failures of machines", lost_formula(cluster) / LOST_LIMIT),
        ]
        if node_us is not None:
            cores = 1e-6 * (nodes * node_us + groups_per_s * broker_us)
            parts.append(Part("broker's core", cores, ("node_us", "group_us", "large_group_us", "snapshot_us")))
        if stored is not None:
            parts.append(Part("broker's disk", groups_per_s * self.group_bytes / stored / MIB, ("store_mib_per_s",)))
        if sent is not None:
            share = self._gib * sent / self._machines / step_s
            parts.append(Part("a source's core, sending weights", share, ("sent_s_per_gib",)))
        if forwarded is not None:
            parts.append(Part("a node's core, weights", self._gib * forwarded / step_s, ("forwarded_s_per_gib",)))
        batches = nodes * self.node_tokens / BATCH_TOKENS / step_s
        if known["ahead_s"] is not None:
            parts.append(Part("lead rank, next groups", known["ahead_s"] * batches, ("ahead_s",)))
        if known["deliver_s"] is not None:
            share = (known["deliver_s"] + (known["prepare_s"] or 0.0)) * batches
            parts.append(Part("lead rank, batches", share / LEAD_SHARE, ("prepare_s", "deliver_s")))
        if known["copied_s_per_gib"] is not None:
            stall_s = self._gib * STATE / (GPUS * self._machines) * known["copied_s_per_gib"]
            parts.append(Part("a checkpoint's stall, over a step", stall_s / step_s, ("copied_s_per_gib",)))
        if control_s is not None:
            share = control_s * nodes / 1000 / step_s
            parts.append(Part("lead rank, control of weights", share, ("control_s",)))
        return sorted(parts, key=lambda part: -part.load)


def first_to_break(options: harness.Options, costs: Costs) -> list[dict[str, Any]]:
    """For each model, length and learner: the fullest part by number of nodes."""
    rows: list[dict[str, Any]] = []
    for model, tokens, machines in itertools.product(options.models, options.tokens, options.large_machines):
        name, gib, tokens_per_s = model.split("=")
        job = Large(options, costs, float(gib), float(tokens_per_s), tokens, machines)
        fullest = {str(nodes): job.parts(nodes)[0] for nodes in options.large_nodes}
        shown = {nodes: f"{part.name}: {part.load:.0%}" for nodes, part in fullest.items()}
        rows.append({"model": name, "tokens": tokens, "machines": machines, "step_s": job.step_s, "nodes": shown})
    return rows


def one_job(options: harness.Options, costs: Costs) -> list[dict[str, Any]]:
    """All parts of the middle job, with the constants that give each."""
    name, gib, tokens_per_s = options.models[len(options.models) // 2].split("=")
    tokens, machines = options.tokens[len(options.tokens) // 2], options.large_machines[-1]
    job = Large(options, costs, float(gib), float(tokens_per_s), tokens, machines)
    nodes = options.large_nodes[len(options.large_nodes) // 2]
    setting = {"model": name, "tokens": tokens, "nodes": nodes, "machines": machines}
    rows = list[dict[str, Any]]()
    for part in job.parts(nodes):
        used = [f"{n} {constant(n):g} ({CONSTANTS[n][0]})" for n in part.constants]
        rows.append({**setting, "part": part.name, "load": part.load, "constants": ", ".join(used) or "assumed"})
    return rows


def largest(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, when smaller ones do too; None: all up to MOST do."""
    found = bisect(range(1, MOST), False, key=lambda n: not fits(n))
    return found if found < MOST - 1 else None


@harness.script(
    nodes=[64, 1000, 10000], staleness=[1, 2, 4, 8], roots=[1, 64], piece_mib=[4.0, 64.0], model_gib=15.0,
    link_gbit=100.0, machines=[1, 8, 64], spares=[0, 1, 4], failures_per_hour=[1e-4, 1e-3], every=20,
    restart_s=600.0, pause_s=5.0, durable_s=120.0, repair_s=14400.0, steps=30, failures=20000,
    # name, GiB, and tokens a second of a node, which are assumed
    models=["8B=15=20000", "70B=131=6000", "671B=1250=3000"], tokens=[4096, 32768, 131072],
    large_nodes=[100, 1000, 10000], large_machines=[8, 64], large_piece_mib=1.0,
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    plain: list[dict[str, Any]] = predict(STAND_IN, options.staleness[-1:], options.steps)
    job = Job(options, costs := Costs.measured(), plain[0]["mean_tokens"], plain[0]["full_engines_s"])
    return {
        "rounds": 1,
        "costs": asdict(costs),
        "mean_tokens": plain[0]["mean_tokens"],
        "full_engines_s": plain[0]["full_engines_s"],
        "pieces_at_node": pieces_at_node(),
        "sizes": [job.load(nodes) for nodes in options.nodes],
        "windows": [job.window(*a) for a in itertools.product(options.nodes, options.roots, options.piece_mib)],
        "failures": [job.failing(m, rate) for rate in options.failures_per_hour for m in options.machines],
        "limits": job.limits(),
        "chain": chain_check(pieces_at_node()),
        "first": first_to_break(options, costs),
        "one_job": one_job(options, costs),
        "missing": [name for name in CONSTANTS if constant(name) is None],
    }
