"""A layout that fits where the given one does not, found with the plan's own model of memory."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from common.config.checks import problems
from common.config.parallel_layout import ModelShape, model_problems, world_problems
from common.config.schema import BaseConfig
from common.process.run_dir import other_values
from launch.plan.job_plan import Plan, stages_of
from launch.plan.memory import ADAM_BYTES, DEVICES, GRADIENT_BYTES, ITEM_BYTES, MAIN_BYTES, fits

MOST_CONTEXT = 8
C = TypeVar("C", bound=BaseConfig)


class Proposal(msgspec.Struct, frozen=True):
    device: str  # name of the GPU, one of DEVICES
    peak: int  # bytes on the fullest rank
    overrides: list[str]  # KEY=VALUE words


def propose(config: C, plan: Plan, shape: ModelShape) -> Proposal | None:
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
            layouts = [c for c in _layouts(sized, shape, plan.gpus_per_node) if fits(_least_bytes(c, plan), size)]
            for tried in sorted(layouts, key=partial(_effort, config)):
                needed = max(stage.peak for stage in stages_of(tried, plan.model, version_bytes))
                if fits(needed, size) and {problem.key for problem in problems(tried)} <= known:
                    changed = other_values(config, tried, may_differ=())
                    return Proposal(name, needed, [f"{key}={_word(value)}" for key, _, value in changed])
    return None


def _sizes(config: C, gpus_per_node: int) -> Iterator[C]:
    """The config with the ranks and nodes that are tried, the fewest ranks first."""
    yield config
    learner, several = config.learner, config.learner.machines
    if several > 1:
        for machines in (several, 2 * several, 4 * several):
            if (world := machines * gpus_per_node) > learner.world_size:
                yield replace(config, learner=replace(learner, world_size=world, machines=machines))
        return
    fleet = config.rl.rollout.nodes * config.rl.rollout.engine.devices if config.rl else 0
    elsewhere = learner.world_size + fleet > gpus_per_node
    for world in range(learner.world_size + 1, gpus_per_node + 1):
        larger = replace(config, learner=replace(learner, world_size=world))
        if config.rl is not None and fleet and not elsewhere:
            rollout = config.rl.rollout
            nodes = min(rollout.nodes, (gpus_per_node - world) // rollout.engine.devices)
            if not nodes:
                return
            larger = replace(larger, rollout=replace(rollout, nodes=nodes))
        yield larger


def _layouts(config: C, shape: ModelShape, gpus_per_node: int) -> Iterator[C]:
    """The config cut in every way that its ranks and the model allow, with and without measures against memory."""
    learner, given = config.learner, config.learner.parallel
    world, memory = learner.world_size, learner.memory
    recompute, offload = {memory.recompute, "full"}, {memory.offload_optimizer, True}
    memories = [replace(memory, recompute=r, offload_optimizer=o) for r, o in product(recompute, offload)]
    weights = {config.rl.weights, replace(config.rl.weights, buffers="host")} if config.rl else {None}
    most = ((world, gpus_per_node), (world, world), (world, MOST_CONTEXT), (shape.experts or 1, world))
    sizes = [[n for n in range(1, limit + 1) if whole % n == 0] for whole, limit in most]
    even = replace(given, virtual_pipeline=1, first_stage_layers=None, last_stage_layers=None)
    for tensor, pipeline, context, expert in product(*sizes):
        stages = given if pipeline == given.pipeline else replace(even, pipeline=pipeline)
        parallel = replace(stages, tensor=tensor, context=context, expert=expert)
        if [*world_problems(world, parallel), *model_problems(shape, parallel)]:
            continue
        for memory, sent in product(memories, weights):
            changed = replace(config, learner=replace(learner, parallel=parallel, memory=memory))
            yield changed if sent is None else replace(changed, weights=sent)


def _least_bytes(tried: BaseConfig, plan: Plan) -> float:
    """A rank of the average stage without activations needs as much; it is counted far sooner than all stages."""
    learner, parallel, experts = tried.learner, tried.learner.parallel, 0
    if (e := plan.model.experts) is not None:
        experts = 3 * plan.model.hidden * e.ffn * e.count * sum(plan.model.moe_layers)
    here = experts / (parallel.expert * parallel.expert_tensor) + (plan.parameters - experts) / parallel.tensor
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
