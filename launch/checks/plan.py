"""slipstream plan CONFIG: what a job or a warm start would be, and every check that its launch would do.

It needs neither a GPU nor torch, Megatron or vLLM. The model's config.json is enough, without the weights.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby, islice
from operator import attrgetter
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from common.config.architecture import Attention
from common.config.schema import BaseConfig, Config
from common.errors import EXIT_DONE, EXIT_USAGE, UsageError
from common.process.logs import visible
from launch.checks.review import Review, make_review
from launch.plan.job_plan import GIB, MIB, Plan, Stage
from launch.plan.layout import KINDS
from launch.plan.memory import DEVICES, HEADROOM, fits

WIDTH = 118
MEMORY = [
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "output",
    "versions",
    "training",
    "update",
    "waiting",
    "host",
]


def command(args: argparse.Namespace) -> int:
    """Print the plan; exit code 2 when a check fails."""
    link_gbit: float = args.link
    if not 0 < link_gbit < math.inf:
        raise UsageError(f"--link: expected the Gb/s of a machine's link, a number above 0, found {link_gbit:g}")
    if args.gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node: expected the GPUs of a machine, at least 1, found {args.gpus_per_node}")
    review = make_review(args.config, args.overrides, args.gpus_per_node, link_gbit)
    if args.json:
        print(msgspec.json.encode(as_json(review)).decode())
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(page(review))
    return EXIT_USAGE if review.failed else EXIT_DONE


def as_json(review: Review) -> dict[str, Any]:
    """Everything on the page and more (the members of every group); the keys are relied on by other programs."""
    return {
        "config": review.file,
        "ok": not review.failed,
        "failed": review.failed,
        "before_launch": review.before_launch,
        "remarks": [remark.what for remark in review.remarks],
        "certificate": _certificate(review),
        "proposal": review.proposal,
        "plan": review.plan,
    }


def _certificate(review: Review) -> dict[str, Any]:
    """Its file, whether it counts, why not, and what it is."""
    found = review.standing
    if found is None:
        return {"counts": False, "why": "the model is not known"}
    return {"counts": not found.why, "file": str(found.file), "why": found.why, "made": found.certificate}


def page(review: Review) -> RenderableType:
    """Checks, what has to be brought, then the plan where there is one."""
    parts: list[RenderableType] = [Text(f"plan of {review.config.run.name} ({review.file})", "bold")]
    parts += _numbered("Failed checks", review.failed, "red")
    if not review.failed:
        parts.append(Text("All checks passed that need no weights or GPU.", "green"))
    parts += _numbered("Before launch", review.before_launch, "yellow")
    if review.plan is None:
        parts.append(Text("No plan: layout or sizes do not fit.", "red"))
        return Group(*parts)
    config, plan = review.config, review.plan
    bodies = {
        "Model and layout": _facts([*_layout(config, plan), *_standing(review)]),
        "Process groups": _groups(plan),
        "Layers, and millions of parameters on one rank": _parameters(plan.stages),
        "GiB on one rank": _memory(plan),
        "Step": _facts(_step(config, plan)),
    }
    if (job := config.rl) is not None:
        bodies["Rollouts and weights"] = _facts(_rollouts(job, plan))
        if job.devices <= plan.gpus_per_node:
            free = map(str, count())
            devices = [(role, " ".join(islice(free, n))) for role, n in job.device_shares.items()]
            devices += _shared(job, plan)
            bodies["GPUs that `slipstream up` gives to each role"] = _facts(devices)
    for title, body in bodies.items():
        parts += (Text(), Text(title, "bold"), body)
    parts += _numbered("Remarks", [remark.what for remark in review.remarks])
    return Group(*parts)


def _numbered(title: str, lines: Sequence[str], style: str = "") -> list[RenderableType]:
    if not lines:
        return []
    numbers = [(f"{n}.", line) for n, line in enumerate(lines, 1)]
    return [Text(), Text(title, f"bold {style}".strip()), _facts(numbers, gap=1, justify="right")]


def _facts(rows: Iterable[tuple[str, str]], gap: int = 2, justify: Literal["left", "right"] = "left") -> Table:
    table = Table.grid(Column(justify=justify, no_wrap=True), Column(), padding=(0, gap))
    for name, text in rows:
        table.add_row(Text(name), Text(visible(text)))
    return table


def _layout(config: BaseConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    model = plan.model
    sizes = plan.sizes
    parallel = config.learner.parallel
    a = model.attention
    heads = f"{a.heads} heads, {a.kv_heads} key-value" if isinstance(a, Attention) else f"{a.heads} heads, latent"
    experts = ""
    if model.experts is not None:
        experts = f", {model.experts.per_token} of {model.experts.count} experts in {sum(model.moe_layers)} layers"
    tied = ", tied embeddings" if model.tied else ""
    yield "model", f"{model.kind}: {model.layers} layers, hidden {model.hidden}, {heads}{experts}{tied}; {plan.dtype}"
    active = f", {_billions(plan.active_parameters)} for one token" if model.experts else ""
    yield "parameters", _billions(plan.parameters) + active
    if (lora := config.learner.lora) is not None:
        share = plan.adapters / plan.parameters
        yield "adapters", f"{_billions(plan.adapters)} of rank {lora.rank} train, {share:.2%} of the parameters"
    if config.learner.value_model is not None:
        most = max(stage.critic for stage in plan.stages) / GIB
        yield (
            "critic",
            f"as many parameters beside the policy; at most {most:.1f} GiB on a rank while the policy trains",
        )
    nodes = -(-sizes.world // plan.gpus_per_node)
    where = f"{nodes} nodes of {plan.gpus_per_node}" if nodes > 1 else "one node"
    axes = f"tensor {sizes.tensor} x context {sizes.context} x data {sizes.data} x pipeline {sizes.pipeline}"
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    yield "learner", f"{sizes.world} ranks on {where}: {axes}{sequence}"
    if model.experts is not None:
        axes = f"expert_tensor {sizes.expert_tensor} x expert {sizes.expert} x expert_data {sizes.expert_data}"
        yield "experts", f"{axes} x pipeline {sizes.pipeline}"


def _standing(review: Review) -> Iterator[tuple[str, str]]:
    if review.standing is not None:
        yield "numbers", review.standing.sentence


def _steps(n: int) -> str:
    return "step" if n == 1 else f"{n} steps"


def _billions(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


def _table(names: Sequence[str], left: Sequence[str] = ()) -> Table:
    columns = (Column(name, justify="left" if name in left else "right", no_wrap=True) for name in names)
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")


def _groups(plan: Plan) -> Table:
    table = _table(("kind", "size", "groups", "nodes", "the first of them"), ("kind", "the first of them"))
    for kind in plan.groups:
        shown = "   ".join(map(_span, kind.groups[:2])) + (" ..." if len(kind.groups) > 2 else "")
        first = "-" if kind.size == 1 else shown
        table.add_row(kind.name, str(kind.size), str(len(kind.groups)), str(kind.nodes), first)
    return table


def _span(group: Sequence[int]) -> str:
    """The ranks of a group, of a large one only the ends."""
    if len(group) <= 4:
        return " ".join(map(str, group))
    if group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return f"{group[0]} {group[1]} {group[2]} ... {group[-1]}"


def _runs(stages: Sequence[Stage], key: Callable[[Stage], object]) -> Iterator[tuple[str, list[Stage]]]:
    """Neighbouring stages with the same key, and their numbers."""
    for _, run in groupby(enumerate(stages), lambda numbered: key(numbered[1])):
        (first, *between), same = zip(*run, strict=True)
        yield f"{first}-{between[-1]}" if between else str(first), list(same)


def _shared(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    """The smallest GPU with room for a rank and all engines; --share-gpus puts both on the first ones."""
    share = config.rollout.nodes * config.rollout.engine.gpu_memory_utilization
    for name, size in DEVICES.items():
        if config.weights.transport != "nccl" and fits(plan.fullest.peak + share * size, size):
            sizes = f"{plan.fullest.peak / GIB:.1f} GiB of the learner and {share * size / GIB:.1f} GiB of engines"
            yield "all", f"the same, with --share-gpus: {sizes} fit one GPU of {name}"
            return


def _parameters(stages: Sequence[Stage]) -> Table:
    shown = [kind for kind in KINDS if any(stage.resident.elements[kind] for stage in stages)]
    table = _table(("stage", "layers", "with", *shown, "in all"), ("stage", "layers", "with"))
    keys = attrgetter("resident.elements", "embedding", "output")
    for name, run in _runs(stages, lambda s: (keys(s), [b - a for a, b in s.layers])):
        first = run[0]
        last = run[-1]
        if len(run) == 1:
            layers = " ".join(f"{a}-{b - 1}" for a, b in first.layers)
        else:
            each = " + ".join(str(b - a) for a, b in first.layers)
            layers = f"{first.layers[0][0]}-{last.layers[-1][1] - 1}, {each} each"
        extra = " ".join(word for word in ("embedding", "output") if getattr(first, word))
        elements = first.resident.elements
        sizes = [*(elements[kind] for kind in shown), sum(elements.values())]
        table.add_row(name, layers, extra or "-", *(f"{n / 1e6:,.1f}" for n in sizes))
    return table


def _memory(plan: Plan) -> RenderableType:
    table = _table(("stage", *MEMORY, "in flight"), ("stage",))
    for name, run in _runs(plan.stages, _memory_row):
        table.add_row(name, *_memory_row(run[0]))
    peak = plan.fullest.peak
    words = [
        f"{name} is {'enough' if fits(peak, size) else 'too small'} ({peak / size:.0%} of {size / GIB:.1f} GiB)"
        for name, size in DEVICES.items()
    ]
    needs = f"The fullest rank needs {peak / GIB:.1f} GiB; with {HEADROOM:.0%} left free, {'; '.join(words)}."
    return Group(table, Text(needs))


def _memory_row(stage: Stage) -> list[str]:
    r, a = stage.resident, stage.activations
    sizes = [r.parameters, r.gradients, r.optimizer, a.layers + a.recomputed, a.output, stage.versions]
    sizes += [stage.training, stage.updating, stage.waiting, stage.host]
    return [*(f"{n / GIB:.1f}" for n in sizes), f"{a.in_flight:g}"]


def _step(config: BaseConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    batch, learner = plan.batch, config.learner
    made = f"{batch.sequences} documents"
    if config.rl is not None:
        groups = learner.rows_per_step
        size = config.rl.rollout.group_size
        made = f"{groups} groups x {size} samples = {batch.sequences} samples"
    yield "batch", f"{made}, at most {batch.longest:,} tokens each: {batch.tokens:,} per step at most"
    if config.rl is not None and batch.updates > 1:
        job = config.rl.learner
        yield (
            "updates",
            f"{job.epochs} epochs x {job.minibatches} minibatches = {batch.updates} a step, on whole groups",
        )
    each = f"{batch.microbatches} of {learner.micro_batch_tokens:,} tokens on each of {plan.sizes.data}"
    most = f"at most {batch.tokens_per_rank:,} tokens a rank"
    yield "microbatches", f"{each} data-parallel ranks when all are that long; {most}"
    if plan.sizes.pipeline > 1:
        short = f"{batch.bubble_short:.1%} when sequences are a quarter as long"
        yield "bubble", f"the pipeline idles {batch.bubble:.1%} of an update, {short}"
    steps = config.run.steps
    total = f"{steps * batch.sequences:,} sequences, at most {steps * batch.tokens / 1e9:,.2f} billion tokens"
    yield "run", f"{steps} steps: {total}"
    size = plan.checkpoint.bytes / GIB
    kept = plan.checkpoint.kept
    disk = f"up to {kept} on the disk: {size * kept:,.0f} GiB"
    each = f"{size:,.1f} GiB" if size >= 0.05 else f"{plan.checkpoint.bytes / MIB:,.1f} MiB"
    yield "checkpoints", f"{each} each, every {_steps(learner.checkpoint.every)}; {disk}"
    times = f"{plan.start.safetensors_s:,.0f} s from safetensors, {plan.start.converted_s:,.0f} s converted"
    pays = " does not pay" if plan.start.converted_s > plan.start.safetensors_s else ""
    yield "start", f"ranks read their weights in about {times} (`slipstream convert`{pays}), if the files are in memory"


def _rollouts(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    assert plan.rl is not None
    window, publish, engine = plan.rl.window, plan.rl.publish, plan.rl.engine
    k = config.staleness.max
    settings = config.rollout.engine
    groups = f"{config.learner.groups_per_step} x {k + 1} = {window.groups} groups outstanding"
    size = f"{window.samples:,} samples, {window.bytes / GIB:,.2f} GiB"
    yield "window", f"staleness {k}: at most {groups}, {size}; a node has up to {window.node_groups}"
    versions = f"{k} version{'s' * (k != 1)}"
    yield "age", f"at most {versions}, or {window.oldest_updates} updates, from a token to an update that trains on it"
    buckets = f"{publish.buckets:,} buckets of {config.weights.bucket_mib} MiB, {publish.tensors:,} tensors"
    limit = f"within {publish.bytes / publish.bytes_per_s:,.0f} s at {publish.bytes_per_s / 1e9:,.2f} GB/s"
    size = f"{publish.bytes / GIB:,.1f} GiB in {buckets}; {limit}"
    part = f"{publish.largest_source_bytes / GIB:,.1f} GiB"
    if publish.adapter_bytes:
        part = f"{publish.adapter_bytes / MIB:,.0f} MiB of adapters"
        size = f"{part}; the first, and to a node that joins, {size}"
    yield "publish", f"every {_steps(config.weights.publish_every)}, {size}"
    about = "about" if config.weights.transport == "relay" else "at least"
    last = f"the last node has everything after {about} {publish.publish_s:,.1f} s"
    largest = f"the largest sends {part}"
    share = f"the learner's fullest machine sends its share in {publish.send_s:,.1f} s"
    yield "sources", f"{publish.sources}, {largest}; with links of {publish.link_gbit:g} Gb/s {last}; {share}"
    sizes = {name: engine.cache_tokens(size, settings.gpu_memory_utilization) for name, size in DEVICES.items()}
    sequences = [f"{tokens // settings.max_model_len:,} on {name}" for name, tokens in sizes.items()]
    devices = f"{plan.rl.nodes} of {engine.devices} device{'s' if engine.devices > 1 else ''}"
    cache = f"cache for {' and '.join(sequences)} sequences of {settings.max_model_len:,} tokens"
    yield "engines", f"{devices}: {engine.weight_bytes / GIB:,.1f} GiB of weights per device; {cache}"
