"""Remarks on a plan that no check refuses: each is one sentence or two."""

from collections.abc import Iterator

from common.config.passthrough import passthrough_warnings
from common.config.schema import BaseConfig, Config, LossConfig
from launch.plan.job_plan import GIB, Plan, RlPart
from launch.plan.memory import DEVICES, HEADROOM, fits
from launch.plan.proposal import Proposal

BUBBLE = 0.15
UNEVEN = 1.15


def remarks(config: BaseConfig, plan: Plan, proposal: Proposal | None) -> list[str]:
    """In the order of the page: groups, memory, pipeline, loss, window, weight plane, engines."""
    out = [*_groups(plan), *_memory(config, plan, proposal), *_pipeline(config, plan), *_experts(config, plan)]
    out += passthrough_warnings(config)
    if (job := config.rl) is not None and plan.rl is not None:
        out += [*_clipping(job.learner.loss), *_window(job, plan.rl)]
        out += [*_publish(job, plan.rl), *_engines(job, plan.rl)]
    return out


def _groups(plan: Plan) -> Iterator[str]:
    costs = {
        "tensor": ("TP", "every layer waits for its collectives; a tensor-parallel group belongs on one node"),
        "expert_tensor": ("ETP", "every expert layer waits for its collectives"),
        "context": ("CP", "every layer gathers keys and values across them"),
        "expert": ("EP", "every expert layer sends its tokens across them twice, forward and backward"),
    }
    for kind in plan.groups:
        if kind.name in costs and kind.nodes > 1:
            name, cost = costs[kind.name]
            yield f"{name} {kind.size} spans {kind.nodes} nodes of {plan.gpus_per_node}: {cost}."
    if plan.dtype == "float32" and plan.sizes.context > 1:
        yield "Transformer Engine has no attention for float32 with CP; a learner that has it ends with exit code 2."
    if plan.sizes.dense_shards == 1 and plan.sizes.world > 1:
        yield "Data x context parallelism is 1: nothing shards the optimizer states of the dense parameters."


def _memory(config: BaseConfig, plan: Plan, proposal: Proposal | None) -> Iterator[str]:
    memory, stage = config.learner.memory, plan.fullest
    if too_small := [name for name, size in DEVICES.items() if not fits(stage.peak, size)]:
        advice = "No layout of these GPUs that was tried does; the job needs more machines, or a smaller model."
        if proposal is not None:
            advice = f"With {' '.join(proposal.overrides)} it needs {proposal.peak / GIB:.1f} GiB and fits"
            advice += f" one of {proposal.device}."
        peak = f"{stage.peak / GIB:.1f} GiB with {HEADROOM:.0%} left free"
        yield f"The fullest rank does not fit a GPU of {' or '.join(too_small)} ({peak}). {advice}"
    ranks = min(plan.sizes.world, plan.gpus_per_node)
    if host := sum(s.host for s in plan.stages) / len(plan.stages) * ranks:
        yield f"Offloading takes about {host / GIB:.0f} GiB of host memory on a node of {ranks} ranks."
    if memory.recompute == "selective":
        yield "Selective recomputation drops the attention matrix; flash attention never keeps it, so little is saved."
    if not config.learner.parallel.sequence and config.learner.parallel.tensor > 1:
        yield "Without sequence parallelism every tensor-parallel rank keeps norms and residuals whole."


def _pipeline(config: BaseConfig, plan: Plan) -> Iterator[str]:
    batch, parallel = plan.batch, config.learner.parallel
    if batch.bubble > BUBBLE:
        idles = f"the pipeline idles {batch.bubble:.0%} of the time"
        larger = f"a larger learner.{config.learner.step_key}"
        fix = f"{larger}, a smaller micro_batch_tokens or learner.parallel.virtual_pipeline fills it"
        yield f"With {batch.microbatches} microbatches per step {idles}; {fix}."
    if parallel.pipeline == 1:
        return
    sizes = [sum(stage.resident.elements.values()) for stage in plan.stages]
    if max(sizes) > UNEVEN * min(sizes):
        heavy, light = sizes.index(max(sizes)), sizes.index(min(sizes))
        fix = "learner.parallel.first_stage_layers and last_stage_layers move layers"
        yield f"Stage {heavy} has {max(sizes) / min(sizes):.2f} times the parameters of stage {light}; {fix}."


def _experts(config: BaseConfig, plan: Plan) -> Iterator[str]:
    experts = plan.model.experts
    if experts is None:
        return
    here = experts.count // plan.sizes.expert
    load = f"computes {experts.per_token} times its own tokens when the load is even"
    grows = "the experts' activations are counted so and grow with the imbalance"
    yield f"A rank has {here} of {experts.count} experts and {load}; {grows}."
    if config.learner.moe.balance == "none" and not config.learner.moe.freeze_router:
        yield "Routers train without balancing; learner.moe.balance or freeze_router keeps the load even."


def _clipping(loss: LossConfig) -> Iterator[str]:
    given = [name for name in ("clip_low", "clip_high", "clip_dual") if getattr(loss, name) is not None]
    if given and loss.proximal == "recompute":
        why = "a batch is one optimizer step, so under proximal: recompute every ratio is 1"
        never = f"learner.loss.{' and '.join(given)} never act{'s' * (len(given) == 1)}"
        yield f"{never}: {why}. proximal: behavior bounds the change since the sampler."


def _window(config: Config, rl: RlPart) -> Iterator[str]:
    window, broker = rl.window, config.broker
    if window.bytes > broker.max_bytes:
        full, most = f"{window.bytes / GIB:.1f} GiB", f"broker.max_bytes ({broker.max_bytes / GIB:.1f} GiB)"
        waits = "nodes would wait before the staleness bound makes them"
        yield f"A full window of longest samples is {full}, more than {most}: {waits}."
    if window.group_bytes > broker.max_message_bytes:
        yield f"A group of longest samples is {window.group_bytes / GIB:.1f} GiB, more than broker.max_message_bytes."


def _publish(config: Config, rl: RlPart) -> Iterator[str]:
    publish = rl.publish
    if publish.publish_s > config.weights.timeout_s:
        most = f"weights.timeout_s ({config.weights.timeout_s:g} s); that needs {publish.bytes_per_s / 1e9:.1f} GB/s"
        sent = f"A publish of {publish.bytes / GIB:.0f} GiB over links of {publish.link_gbit:g} Gb/s"
        yield f"{sent} takes about {publish.publish_s:,.0f} s, more than {most}."
    if config.weights.buffers == "device":
        lead = f"the lead rank keeps up to three versions of {publish.bytes / GIB:.0f} GiB in its device's memory"
        engine = "an engine without tensor parallelism one, beside what vLLM takes"
        yield f"For weights.buffers: device {lead}, and {engine}."
    if publish.bytes > 64 * GIB and config.weights.buffers == "host":
        rank = f"{publish.largest_source_bytes / GIB:.1f} GiB of it are on the rank with the largest part"
        machine = f"{publish.largest_machine_bytes / GIB:.1f} GiB on the machine with the most"
        node = f"Every node has a published version of {publish.bytes / GIB:.0f} GiB in host memory"
        yield f"{node}. In the learner {rank}, and {machine}."


def _engines(config: Config, rl: RlPart) -> Iterator[str]:
    engine, settings = rl.engine, config.rollout.engine
    for name, size in DEVICES.items():
        tokens = engine.cache_tokens(size, settings.gpu_memory_utilization)
        if tokens < settings.max_model_len:
            of = f"An engine of {engine.devices} device{'s' if engine.devices > 1 else ''}"
            weights = f"{engine.weight_bytes / GIB:.1f} GiB of weights per device"
            left = f"cache for {tokens:,} tokens; one sequence may need {settings.max_model_len:,}"
            yield f"{of} has {weights}, which leaves a GPU of {name} {left}."
