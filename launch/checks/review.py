"""A config under review: the checks of a launch that need no weights, the plan of the job, and remarks on it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from common.config.architecture import UnknownArchitecture, read_architecture
from common.config.checks import problems, resolve_paths, size_problems
from common.config.group_size import most_kept_bytes
from common.config.loading import load_either
from common.config.loss import plugins as loss_plugins
from common.config.network_checks import is_loopback, split_address
from common.config.parallel_layout import model_problems, world_problems
from common.config.passthrough import passthrough_warnings
from common.config.schema import BaseConfig, Config, LearnerConfig
from common.config.without_effect import without_effect
from common.errors import ConfigError, Problem, UsageError, of_source
from common.hub import SCHEME
from common.process.run_dir import RunDir, other_values
from launch.certificates import Standing, read_model, refused, shape_folder, standing
from launch.checks.findings import Finding, note, warning
from launch.plan.job_plan import GIB, Plan, RlPart, make_plan, stages_of
from launch.plan.memory import ADAM_BYTES, DEVICES, GRADIENT_BYTES, HEADROOM, ITEM_BYTES, MAIN_BYTES, fits
from launch.up.devices import port_problems
from learner.loss import plugins
from rollout_fleet.driver_factory import check_prompts
from rollout_fleet.environments.description import PYTHON_KEY, Description, check_sources, limit_problems

# ---------------------------------------------------------------- advice
# Remarks that no check refuses, and a layout that fits where the given one does not. It is found with the plan's own
# model of memory.


BUBBLE = 0.15
UNEVEN = 1.15
MOST_CONTEXT = 8
C = TypeVar("C", bound=BaseConfig)


class Proposal(msgspec.Struct, frozen=True):
    device: str  # name of the GPU, one of DEVICES
    peak: int  # bytes on the fullest rank
    overrides: list[str]  # KEY=VALUE words


def propose(config: BaseConfig, plan: Plan) -> Proposal | None:
    """The nearest layout for the smallest GPU that the plan of `config` does not fit; None where none is found.

    It has the fewest ranks, then the fewest new measures against memory, then the fewest other axes. A job of one
    machine stays on it and may lose engines; one of several may get two or four times as many.
    """
    known = {problem.key for problem in problems(config)}
    version_bytes = plan.rl.publish.bytes if plan.rl is not None else 0
    for name, size in DEVICES.items():
        if fits(plan.fullest.peak, size):
            continue
        for sized in _sizes(config, plan.gpus_per_node):
            layouts = [c for c in _layouts(sized, plan) if fits(_least_bytes(c, plan), size)]
            for tried in sorted(layouts, key=partial(_effort, config)):
                needed = max(stage.peak for stage in stages_of(tried, plan.model, version_bytes))
                if fits(needed, size) and {problem.key for problem in problems(tried)} <= known:
                    changed = other_values(config, tried, may_differ=())
                    return Proposal(name, needed, [f"{key}={_word(value)}" for key, _, value in changed])
    return None


def _sizes(config: C, gpus_per_node: int) -> Iterator[C]:
    """The config with the ranks and nodes that are tried, the fewest ranks first."""
    yield config
    learner = config.learner
    if learner.machines > 1:
        for machines in (learner.machines, 2 * learner.machines, 4 * learner.machines):
            if (world := machines * gpus_per_node) > learner.world_size:
                yield replace(config, learner=replace(learner, world_size=world, machines=machines))
        return
    for world in range(learner.world_size + 1, gpus_per_node + 1):
        larger = replace(config, learner=replace(learner, world_size=world))
        if config.rl is not None and config.rollout_nodes and config.devices <= gpus_per_node:
            rollout = config.rl.rollout
            nodes = min(rollout.nodes, (gpus_per_node - world) // rollout.engine.devices)
            if not nodes:
                return
            larger = replace(larger, rollout=replace(rollout, nodes=nodes))
        yield larger


def _layouts(config: C, plan: Plan) -> Iterator[C]:
    """The config cut in every way that its ranks and the model allow, with and without measures against memory."""
    learner = config.learner
    given, world, memory = learner.parallel, learner.world_size, learner.memory
    recompute = {memory.recompute, "full"}
    offload = {memory.offload_optimizer, True}
    memories = [replace(memory, recompute=r, offload_optimizer=o) for r, o in product(recompute, offload)]
    weights = {config.rl.weights, replace(config.rl.weights, buffers="host")} if config.rl else {None}
    experts = plan.model.experts.count if plan.model.experts is not None else 1
    most = ((world, plan.gpus_per_node), (world, world), (world, MOST_CONTEXT), (experts, world))
    sizes = [[n for n in range(1, limit + 1) if whole % n == 0] for whole, limit in most]
    even = replace(given, virtual_pipeline=1, first_stage_layers=None, last_stage_layers=None)
    for tensor, pipeline, context, expert in product(*sizes):
        stages = given if pipeline == given.pipeline else replace(even, pipeline=pipeline)
        parallel = replace(stages, tensor=tensor, context=context, expert=expert)
        if [*world_problems(world, parallel), *model_problems(plan.model, parallel)]:
            continue
        for memory, sent in product(memories, weights):
            changed = replace(config, learner=replace(learner, parallel=parallel, memory=memory))
            yield changed if sent is None else replace(changed, weights=sent)


def _least_bytes(tried: BaseConfig, plan: Plan) -> float:
    """A rank of the average stage without activations needs as much; it is counted far sooner than all stages."""
    learner = tried.learner
    parallel = tried.learner.parallel
    experts = 0
    if (e := plan.model.experts) is not None:
        experts = 3 * plan.model.hidden * e.ffn * e.count * sum(plan.model.moe_layers)
    here = experts / (parallel.expert * parallel.expert_tensor) + (plan.parameters - experts) / parallel.tensor
    if learner.lora is not None:  # adapters are a small part of what is there
        return here / parallel.pipeline * ITEM_BYTES[plan.dtype]
    whole = here / parallel.pipeline * (ITEM_BYTES[plan.dtype] + GRADIENT_BYTES)
    return whole + plan.parameters / learner.world_size * (ADAM_BYTES + MAIN_BYTES[plan.dtype])


def _effort(given: BaseConfig, tried: BaseConfig) -> tuple[int, ...]:
    """How much a candidate changes and costs; the least is proposed."""
    before, after = given.learner.memory, tried.learner.memory
    again = before.recompute != after.recompute  # costs more than moving the optimizer's states once a step
    measures = again + (before.offload_optimizer != after.offload_optimizer)
    old, new = given.learner.parallel, tried.learner.parallel
    axes = sum(getattr(old, name) != getattr(new, name) for name in ("tensor", "pipeline", "context", "expert"))
    host = given.rl is not None and tried.rl is not None and given.rl.weights != tried.rl.weights
    return measures, again, axes, new.model_ranks, new.pipeline, new.context, new.expert, host


def _word(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def remarks(config: BaseConfig, plan: Plan, proposal: Proposal | None) -> list[Finding]:
    """In the order of the page: groups, memory, pipeline, loss, window, weight plane, engines."""
    out = [*_groups(plan), *_memory(config, plan, proposal), *_pipeline(config, plan), *_experts(config, plan)]
    out += [note("passthrough", "owned", text) for text in passthrough_warnings(config)]
    if (job := config.rl) is not None and plan.rl is not None:
        out += [*_clipping(job.learner), *_window(job, plan.rl)]
        out += [*_publish(job, plan.rl), *_engines(job, plan.rl)]
    return out


def _groups(plan: Plan) -> Iterator[Finding]:
    costs = {
        "tensor": ("TP", "every layer waits for its collectives; a tensor-parallel group belongs on one node"),
        "expert_tensor": ("ETP", "every expert layer waits for its collectives"),
        "context": ("CP", "every layer gathers keys and values across them"),
        "expert": ("EP", "every expert layer sends its tokens across them twice, forward and backward"),
    }
    for kind in plan.groups:
        if kind.name in costs and kind.nodes > 1:
            name, cost = costs[kind.name]
            yield note(
                "groups", "spans_nodes", f"{name} {kind.size} spans {kind.nodes} nodes of {plan.gpus_per_node}: {cost}."
            )
    if plan.dtype == "float32" and plan.sizes.context > 1:
        text = "Transformer Engine has no attention for float32 with CP; a learner that has it ends with exit code 2."
        yield note("groups", "float32_context", text)
    if plan.sizes.dense_shards == 1 and plan.sizes.world > 1:
        text = "Data x context parallelism is 1: nothing shards the optimizer states of the dense parameters."
        yield note("groups", "unsharded", text)


def _memory(config: BaseConfig, plan: Plan, proposal: Proposal | None) -> Iterator[Finding]:
    memory = config.learner.memory
    stage = plan.fullest
    if too_small := [name for name, size in DEVICES.items() if not fits(stage.peak, size)]:
        advice = "No layout of these GPUs that was tried does; the job needs more machines, or a smaller model."
        if proposal is not None:
            advice = f"With {' '.join(proposal.overrides)} it needs {proposal.peak / GIB:.1f} GiB and fits"
            advice += f" one of {proposal.device}."
        peak = f"{stage.peak / GIB:.1f} GiB with {HEADROOM:.0%} left free"
        text = f"The fullest rank does not fit a GPU of {' or '.join(too_small)} ({peak}). {advice}"
        yield note("memory", "too_small", text)
    ranks = min(plan.sizes.world, plan.gpus_per_node)
    if host := sum(s.host for s in plan.stages) / len(plan.stages) * ranks:
        text = f"Offloading takes about {host / GIB:.0f} GiB of host memory on a node of {ranks} ranks."
        yield note("memory", "host", text)
    if memory.recompute == "selective":
        text = "Selective recomputation drops the attention matrix; flash attention never keeps it, so little is saved."
        yield note("memory", "selective", text)
    if not config.learner.parallel.sequence and config.learner.parallel.tensor > 1:
        text = "Without sequence parallelism every tensor-parallel rank keeps norms and residuals whole."
        yield note("memory", "no_sequence", text)


def _pipeline(config: BaseConfig, plan: Plan) -> Iterator[Finding]:
    batch = plan.batch
    parallel = config.learner.parallel
    if batch.bubble > BUBBLE:
        idles = f"the pipeline idles {batch.bubble:.0%} of the time"
        larger = f"a larger learner.{config.learner.step_key}"
        fix = f"{larger}, a smaller micro_batch_tokens or learner.parallel.virtual_pipeline fills it"
        yield note("pipeline", "idles", f"With {batch.microbatches} microbatches per update {idles}; {fix}.")
    if parallel.pipeline == 1:
        return
    sizes = [sum(stage.resident.elements.values()) for stage in plan.stages]
    if max(sizes) > UNEVEN * min(sizes):
        heavy = sizes.index(max(sizes))
        light = sizes.index(min(sizes))
        fix = "learner.parallel.first_stage_layers and last_stage_layers move layers"
        text = f"Stage {heavy} has {max(sizes) / min(sizes):.2f} times the parameters of stage {light}; {fix}."
        yield note("pipeline", "uneven", text)


def _experts(config: BaseConfig, plan: Plan) -> Iterator[Finding]:
    experts = plan.model.experts
    if experts is None:
        return
    here = experts.count // plan.sizes.expert
    load = f"computes {experts.per_token} times its own tokens when the load is even"
    grows = "the experts' activations are counted so and grow with the imbalance"
    yield note("experts", "load", f"A rank has {here} of {experts.count} experts and {load}; {grows}.")
    if config.learner.moe.balance == "none" and not config.learner.moe.freeze_router:
        text = "Routers train without balancing; learner.moe.balance or freeze_router keeps the load even."
        yield note("experts", "unbalanced", text)


def _clipping(learner: LearnerConfig) -> Iterator[Finding]:
    loss = learner.loss
    given = [name for name in ("clip_low", "clip_high", "clip_dual") if getattr(loss, name) is not None]
    if given and loss.proximal == "recompute" and learner.updates == 1:
        why = "a batch is one optimizer update, so under proximal: recompute every ratio is 1"
        never = f"learner.loss.{' and '.join(given)} never act{'s' * (len(given) == 1)}"
        text = f"{never}: {why}. Several updates per batch let them act, and so does proximal: behavior."
        yield note("loss", "never_clips", text)


def _window(config: Config, rl: RlPart) -> Iterator[Finding]:
    window, broker = rl.window, config.broker
    kept = most_kept_bytes(config)
    if window.bytes > kept:
        full = f"{window.bytes / GIB:.1f} GiB"
        key = "memory_bytes" if broker.max_bytes is None else "max_bytes"
        most = f"broker.{key} ({kept / GIB:.1f} GiB)"
        waits = "nodes would wait before the staleness bound makes them"
        yield note("window", "broker_full", f"A full window of longest samples is {full}, more than {most}: {waits}.")
    if window.group_bytes > broker.max_message_bytes:
        text = f"A group of longest samples is {window.group_bytes / GIB:.1f} GiB, more than broker.max_message_bytes."
        yield note("window", "group_too_large", text)


def _publish(config: Config, rl: RlPart) -> Iterator[Finding]:
    publish = rl.publish
    bound_s = publish.bytes / publish.bytes_per_s
    whole_s = publish.publish_s * publish.bytes / (publish.adapter_bytes or publish.bytes)  # as the first version is
    if whole_s > bound_s:
        most = (
            f"its bound ({bound_s:,.0f} s, weights.timeout_s or more); that needs {publish.bytes_per_s / 1e9:.1f} GB/s"
        )
        sent = f"A publish of {publish.bytes / GIB:.0f} GiB over links of {publish.link_gbit:g} Gb/s"
        yield note("publish", "slow", f"{sent} takes about {whole_s:,.0f} s, more than {most}.")
    if config.weights.buffers == "device":
        lead = f"the lead rank keeps up to three versions of {publish.bytes / GIB:.0f} GiB in its device's memory"
        engine = "an engine without tensor parallelism one, beside what vLLM takes"
        yield note("publish", "device_buffers", f"For weights.buffers: device {lead}, and {engine}.")
    if publish.bytes > 64 * GIB and config.weights.buffers == "host":
        rank = f"{publish.largest_source_bytes / GIB:.1f} GiB of it are on the rank with the largest part"
        machine = f"{publish.largest_machine_bytes / GIB:.1f} GiB on the machine with the most"
        node = f"Every node has a published version of {publish.bytes / GIB:.0f} GiB in host memory"
        yield note("publish", "host_buffers", f"{node}. In the learner {rank}, and {machine}.")


def _engines(config: Config, rl: RlPart) -> Iterator[Finding]:
    engine = rl.engine
    settings = config.rollout.engine
    loss = config.learner.loss
    if settings.quantization is not None and (loss.proximal, loss.correction) == ("recompute", "none"):
        what = "Rounded weights sample from another policy than the learner's"
        yield note("engines", "uncorrected", f"{what}, and learner.loss.correction: none does not correct for it.")
    for name, size in DEVICES.items():
        tokens = engine.cache_tokens(size, settings.gpu_memory_utilization)
        if tokens < settings.max_model_len:
            of = f"An engine of {engine.devices} device{'s' if engine.devices > 1 else ''}"
            weights = f"{engine.weight_bytes / GIB:.1f} GiB of weights per device"
            left = f"cache for {tokens:,} tokens; one sequence may need {settings.max_model_len:,}"
            yield note("engines", "little_cache", f"{of} has {weights}, which leaves a GPU of {name} {left}.")


# ---------------------------------------------------------------- review

GPUS_PER_NODE = 8
LARGEST_GPU = 288e9  # bytes
LINK_GBIT = 100.0  # Gb/s of a machine's link


@dataclass
class Review:
    """A config, the plan of its job, and everything that speaks against a launch."""

    file: str  # the config's name in messages
    config: BaseConfig
    plan: Plan | None = None  # None when layout and sizes do not fit, or `no_plan` says why
    refused: list[Problem] = field(default_factory=list)  # even when every file is in its place
    missing: list[Problem] = field(default_factory=list)  # files that have to be brought along
    not_yet: list[Finding] = field(default_factory=list)  # parts that this version cannot launch by itself
    proposal: Proposal | None = None  # where the layout does not fit every GPU
    remarks: list[Finding] = field(default_factory=list)  # no check refuses these
    no_plan: str = ""  # the reason why the model cannot be planned
    environments: dict[str, Description] = field(default_factory=dict[str, Description])  # by source; {}: refused
    standing: Standing | None = None  # None: the model is not known

    @property
    def failed(self) -> list[str]:
        return [describe(problem) for problem in self.refused]

    @property
    def before_launch(self) -> list[str]:
        return [*(describe(problem) for problem in self.missing), *(finding.what for finding in self.not_yet)]


def make_review(
    file: str, overrides: list[str], gpus_per_node: int = GPUS_PER_NODE, link_gbit: float = LINK_GBIT
) -> Review:
    """Check and plan a config on a machine that need not run it; raises UsageError when there can be no plan."""
    config = resolve_paths(load_either(Path(file), overrides))
    made = review(config, file, gpus_per_node, link_gbit, libraries=False)
    if made.no_plan:
        raise UsageError(made.no_plan)
    return made


def review(
    config: BaseConfig,
    file: str,
    gpus_per_node: int = GPUS_PER_NODE,
    link_gbit: float = LINK_GBIT,
    libraries: bool = True,
) -> Review:
    """Check and plan a config with absolute paths; `libraries`: those of the environment must be installed here."""
    made = Review(file, config, not_yet=[*_not_yet(config, gpus_per_node)])
    name = config.model.path
    try:
        path, not_here = shape_folder(config, file)
    except UsageError as error:
        made.no_plan = str(error)
        made.refused.append(Problem("model.path", "a model of the hub", str(error).removeprefix("model.path: ")))
        return made
    if not_here:
        made.missing.append(Problem("model.path", "a model of the hub", not_here.removeprefix("model.path: ")))
        shape = f"The hub's model is not here; its shape is the one in {path}/config.json."
        made.remarks.append(note("model", "not_here", shape))
    idle, drop = "the job runs as if it were not there", "leave it out, unless another run of this file needs it"
    made.remarks += [warning("config", "no_effect", text, why=idle, fix=drop) for text in without_effect(config)]
    made.standing = standing(config, file, path)
    model = msgspec.structs.replace(config.model, path=str(path))
    made.config = config = msgspec.structs.replace(config, model=model)
    for problem in problems(config):
        downloaded = problem.key == "model.path" and name.startswith(SCHEME)  # by a launch
        if problem.kind == "value":
            made.refused.append(problem)
        elif not downloaded:
            made.missing.append(problem)
    made.refused += machine_problems(config, gpus_per_node)
    made.refused += refused(config, made.standing)
    if config.rl is not None and not any(p.key.endswith(PYTHON_KEY.removeprefix("tasks")) for p in made.refused):
        try:
            made.environments = check_sources(config.rl, file, libraries)
        except ConfigError as error:
            made.refused.append(error.problem)
        else:
            _add_limits(made, config.rl)
    if config.rl is not None:
        _try_prompts(made, config.rl)
    if config.rl is not None and (named := loss_plugins(config.rl)):
        made.refused += plugins.ask(config.rl)
        if not plugins.can_check():
            unseen = f"{', '.join(named)}: this Python has no torch. The learner checks these parts when it starts."
            made.remarks.append(note("loss", "unchecked", unseen))
    try:
        _add_plan(made, path, gpus_per_node, link_gbit)
    except UnknownArchitecture as error:
        made.no_plan = f"model.path: {path}/config.json: {error}"
    except UsageError as error:
        made.no_plan = str(error)
    return made


def _add_limits(made: Review, config: Config) -> None:
    """Limits that nothing enforces: a new run is refused, and one that has begun keeps them."""
    unused = list(limit_problems(config, made.environments))
    if not RunDir.of(config).began:
        made.refused += unused
        return
    why, fix = "a run that has begun continues all the same", "remove the key"
    made.remarks += [warning("environment", wrong.key, describe(wrong), why=why, fix=fix) for wrong in unused]


def _try_prompts(made: Review, config: Config) -> None:
    """Fill each tasks.prompt from the first rows of a dataset that is here; doctor leaves out a source that fails."""
    for name, job in config.sources.items():
        try:
            with of_source(name):
                check_prompts(job, made.file)
        except ConfigError as error:
            made.refused.append(error.problem)
            made.environments.pop(name, None)


def _add_plan(made: Review, folder: Path, gpus_per_node: int, link_gbit: float) -> None:
    """The plan, what follows from it alone, and remarks; nothing where layout and sizes do not fit.

    Raises UnknownArchitecture, and UsageError as `read_model`.
    """
    config = made.config
    parallel = made.config.learner.parallel
    model = read_architecture(read_model(folder))
    if [*size_problems(config), *world_problems(config.learner.world_size, parallel), *model_problems(model, parallel)]:
        return
    plan = made.plan = make_plan(config, model, gpus_per_node, link_gbit)
    if not all(fits(plan.fullest.peak, size) for size in DEVICES.values()):
        made.proposal = propose(config, plan)
    made.remarks += remarks(config, plan, made.proposal)
    if plan.rl is not None and (weights := plan.rl.engine.weight_bytes) > LARGEST_GPU:
        found = f"{weights / GIB:.0f} GiB of weights per device, more than any GPU has"
        made.refused.append(Problem("rollout.engine.tensor_parallel", "more devices per engine", found))


def describe(problem: Problem) -> str:
    """A problem in one line, without the current folder in front of paths."""
    return str(problem).replace(f"{Path.cwd()}{os.sep}", "")


def machine_problems(config: BaseConfig, gpus_per_node: int) -> Iterator[Problem]:
    """Parts of a job that do not fit on machines of so many GPUs."""
    world, machines = config.learner.world_size, config.learner.machines
    hint = f"machines of {gpus_per_node} GPUs are assumed; --gpus-per-node of `slipstream plan` says otherwise"
    if world > machines * gpus_per_node:
        expected = f"at least {-(-world // gpus_per_node)} for {world} ranks; docs/machines.md"
        yield Problem("learner.machines", expected, f"{machines}", hint)
    if config.rl is not None and (engine := config.rl.rollout.engine).devices > gpus_per_node:
        expected = f"tensor_parallel x pipeline_parallel of at most {gpus_per_node}, the GPUs of its machine"
        found = f"{engine.tensor_parallel} x {engine.pipeline_parallel} = {engine.devices}"
        yield Problem("rollout.engine.tensor_parallel", expected, found, hint)


def _not_yet(config: BaseConfig, gpus_per_node: int) -> Iterator[Finding]:
    """Parts that this version cannot launch by itself."""
    if config.learner.machines > 1:
        hosts: list[str] = []
        with suppress(ValueError):  # a wrong address is among the problems
            hosts = [split_address(address)[0] for address in config.broker.addresses]
        if any(map(is_loopback, hosts)):
            machines = f"the {config.learner.machines} machines of the learner do not reach a loopback address"
            what = f"broker.address: {machines}; name one of the broker's machine, tcp://HOST:PORT"
            yield note("launch", "loopback_broker", what)
    elif config.rl is not None and config.devices > gpus_per_node and is_loopback(config.rl.weights.address):
        roles = f"{config.devices} devices of learner and rollout nodes"
        why = f"{roles} are more than one machine of {gpus_per_node} has"
        needs = "broker.credentials, and weights.transport: relay or weights.network: trusted"
        what = f"weights.address: {why}, and weights.address is a loopback address; another one needs {needs}"
        yield note("launch", "loopback_weights", what)
    if config.learner.machines == 1:  # else `up` is no way to start it
        for problem in port_problems(config):
            yield note("launch", "health_port", f"{problem}")
