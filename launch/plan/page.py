"""The page that `slipstream plan` prints."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.config.schema import Config, SftConfig
from launch.plan.architecture import Attention
from launch.plan.job_plan import Plan, Stage
from launch.plan.process_groups import GroupKind
from launch.plan.rank_parameters import KINDS
from launch.plan.remarks import DEVICES, HEADROOM, fits
from launch.plan.review import Review

GIB = 1 << 30
WIDTH = 118
MEMORY = ("parameters", "gradients", "optimizer", "activations", "output", "training", "update", "waiting", "host")


def show(review: Review) -> None:
    """Print the page to the terminal, or as plain text where there is none."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(page(review))


def page(review: Review) -> RenderableType:
    """Checks, what has to be brought, then the plan where there is one."""
    parts: list[RenderableType] = [Text(f"plan of {review.config.run.name} ({review.file})", "bold")]
    parts += _numbered("Failed checks", review.failed, "red")
    if not review.failed:
        parts.append(Text("All checks passed that need no weights, data or GPU.", "green"))
    parts += _numbered("Before launch", review.before_launch, "yellow")
    if review.plan is None:
        parts.append(Text("No plan: the layout does not fit the model.", "red"))
        return Group(*parts)
    parts += _sections(review.config, review.plan)
    parts += _numbered("Remarks", review.remarks)
    return Group(*parts)


def _sections(config: Config | SftConfig, plan: Plan) -> Iterator[RenderableType]:
    yield from _section("Model and layout", _facts(_layout(config, plan)))
    yield from _section("Process groups", _groups(plan))
    yield from _section("Layers, and millions of parameters on one rank", _parameters(plan.stages))
    yield from _section("GiB on one rank", _memory(plan.stages))
    yield _verdict(plan)
    yield from _section("Step", _facts(_step(config, plan)))
    if isinstance(config, Config):
        yield from _section("Rollouts and weights", _facts(_rollouts(config, plan)))


def _section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, "bold")
    yield body


def _numbered(title: str, lines: Sequence[str], style: str = "") -> list[RenderableType]:
    if not lines:
        return []
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for n, line in enumerate(lines, 1):
        table.add_row(f"{n}.", Text(line))
    return [Text(), Text(title, f"bold {style}".strip()), table]


def _facts(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _layout(config: Config | SftConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    model, sizes, parallel = plan.model, plan.sizes, config.learner.parallel
    a = model.attention
    heads = f"{a.heads} heads, {a.kv_heads} key-value" if isinstance(a, Attention) else f"{a.heads} heads, latent"
    experts = ""
    if model.experts is not None:
        experts = f", {model.experts.per_token} of {model.experts.count} experts in {sum(model.moe_layers)} layers"
    tied = ", tied embeddings" if model.tied else ""
    yield "model", f"{model.kind}: {model.layers} layers, hidden {model.hidden}, {heads}{experts}{tied}; {plan.dtype}"
    active = f", {_billions(plan.active_parameters)} for one token" if model.experts else ""
    yield "parameters", _billions(plan.parameters) + active
    nodes = -(-sizes.world // plan.gpus_per_node)
    where = f"{nodes} nodes of {plan.gpus_per_node}" if nodes > 1 else "one node"
    axes = f"tensor {sizes.tensor} x context {sizes.context} x data {sizes.data} x pipeline {sizes.pipeline}"
    sequence = ", sequence parallel" if parallel.sequence_parallel else ""
    yield "learner", f"{sizes.world} ranks on {where}: {axes}{sequence}"
    if model.experts is not None:
        axes = f"expert_tensor {sizes.expert_tensor} x expert {sizes.expert} x expert_data {sizes.expert_data}"
        yield "experts", f"{axes} x pipeline {sizes.pipeline}"


def _steps(n: int) -> str:
    return "step" if n == 1 else f"{n} steps"


def _billions(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


def _table(names: Sequence[str], left: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _groups(plan: Plan) -> Table:
    table = _table(("kind", "size", "groups", "nodes", "the first of them"), ("kind", "the first of them"))
    for kind in plan.groups:
        table.add_row(kind.name, str(kind.size), str(len(kind.groups)), str(kind.nodes), _members(kind))
    return table


def _members(kind: GroupKind) -> str:
    """Ranks of the first two groups, by start, stride and end."""
    if kind.size == 1:
        return "-"
    shown = [_span(group) for group in kind.groups[:2]]
    return "   ".join(shown) + (" ..." if len(kind.groups) > 2 else "")


def _span(group: Sequence[int]) -> str:
    if len(group) <= 4:
        return " ".join(map(str, group))
    steps = {b - a for a, b in pairwise(group)}
    if steps == {1}:
        return f"{group[0]}-{group[-1]}"
    return f"{group[0]} {group[1]} {group[2]} ... {group[-1]}"


def _runs(stages: Sequence[Stage], same: Sequence[object]) -> Iterator[tuple[str, list[Stage]]]:
    """Neighbouring stages that are equal in `same`, with their numbers."""
    start = 0
    for end in range(1, len(stages) + 1):
        if end == len(stages) or same[end] != same[start]:
            yield str(start) if end - start == 1 else f"{start}-{end - 1}", list(stages[start:end])
            start = end


def _parameters(stages: Sequence[Stage]) -> Table:
    shown = [kind for kind in KINDS if any(stage.resident.elements[kind] for stage in stages)]
    table = _table(("stage", "layers", "with", *shown, "in all"), ("stage", "layers", "with"))
    keys = [(s.resident.elements, s.embedding, s.output, [b - a for a, b in s.layers]) for s in stages]
    for name, run in _runs(stages, keys):
        first, last = run[0], run[-1]
        if len(run) == 1:
            layers = " ".join(f"{a}-{b - 1}" for a, b in first.layers)
        else:
            each = " + ".join(str(b - a) for a, b in first.layers)
            layers = f"{first.layers[0][0]}-{last.layers[-1][1] - 1}, {each} each"
        extra = " ".join(word for word, has in (("embedding", first.embedding), ("output", first.output)) if has)
        elements = first.resident.elements
        sizes = [*(elements[kind] for kind in shown), sum(elements.values())]
        table.add_row(name, layers, extra or "-", *(f"{n / 1e6:,.1f}" for n in sizes))
    return table


def _memory(stages: Sequence[Stage]) -> Table:
    table = _table(("stage", *MEMORY, "in flight"), ("stage",))
    rows = [_memory_row(stage) for stage in stages]
    for name, run in _runs(stages, rows):
        table.add_row(name, *_memory_row(run[0]))
    return table


def _memory_row(stage: Stage) -> list[str]:
    r, a = stage.resident, stage.activations
    sizes = [r.parameters, r.gradients, r.optimizer, a.layers + a.recomputed, a.output]
    sizes += [stage.training, stage.updating, stage.waiting, stage.host]
    return [*(f"{n / GIB:.1f}" for n in sizes), f"{a.in_flight:g}"]


def _verdict(plan: Plan) -> Text:
    peak = plan.fullest.peak
    words = [
        f"{name} {'holds' if fits(peak, size) else 'does not hold'} it ({peak / size:.0%} of {size / GIB:.1f} GiB)"
        for name, size in DEVICES.items()
    ]
    return Text(f"The fullest rank needs {peak / GIB:.1f} GiB; with {HEADROOM:.0%} left free, {'; '.join(words)}.")


def _step(config: Config | SftConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    batch, learner = plan.batch, config.learner
    if isinstance(config, Config):
        made = (
            f"{config.learner.groups_per_step} groups x {config.rollout.group_size} samples = {batch.sequences} samples"
        )
    else:
        made = f"{batch.sequences} documents"
    yield "batch", f"{made}, at most {batch.longest:,} places each: {batch.places:,} per step at most"
    yield (
        "microbatches",
        f"{batch.microbatches} of {learner.micro_batch_tokens:,} places on each of {plan.sizes.data} data-parallel "
        f"ranks when all are that long; at most {batch.places_per_rank:,} places a rank",
    )
    if plan.sizes.pipeline > 1:
        short = f"{batch.bubble_short:.1%} when sequences are a quarter as long"
        yield "bubble", f"the pipeline idles {batch.bubble:.1%} of a step, {short}"
    steps = config.run.steps
    total = f"{steps * batch.sequences:,} sequences, at most {steps * batch.places / 1e9:,.2f} billion places"
    yield "run", f"{steps} steps: {total}"
    checkpoint = plan.checkpoint
    yield (
        "checkpoints",
        f"{checkpoint.bytes / GIB:,.1f} GiB each, every {_steps(learner.checkpoint.every)}; up to {checkpoint.kept} on "
        f"the disk: {checkpoint.bytes * checkpoint.kept / GIB:,.0f} GiB",
    )


def _rollouts(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    assert plan.rl is not None
    window, publish, engine = plan.rl.window, plan.rl.publish, plan.rl.engine
    k, settings = config.staleness.max, config.rollout.engine
    yield (
        "window",
        f"staleness {k}: at most {config.learner.groups_per_step} x {k + 1} = {window.groups} groups outstanding, "
        f"{window.samples:,} samples, {window.bytes / GIB:,.2f} GiB; a node holds up to {window.node_groups}",
    )
    yield (
        "publish",
        f"every {_steps(config.weights.publish_every)}, {publish.bytes / GIB:,.1f} GiB in {publish.buckets:,} buckets "
        f"of {config.weights.bucket_mib} MiB, {publish.tensors:,} tensors; within {config.weights.timeout_s:g} s at "
        f"{publish.bytes_per_s / 1e9:,.2f} GB/s",
    )
    sequences = []
    for name, size in DEVICES.items():
        tokens = engine.cache_tokens(size, settings.gpu_memory_utilization)
        sequences.append(f"{tokens // settings.max_model_len:,} on {name}")
    yield (
        "engines",
        f"{plan.rl.nodes} of {engine.devices} device{'s' if engine.devices > 1 else ''}: "
        f"{engine.weight_bytes / GIB:,.1f} GiB of weights per device; cache for {' and '.join(sequences)} sequences of "
        f"{settings.max_model_len:,} tokens",
    )
