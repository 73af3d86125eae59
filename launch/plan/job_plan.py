"""Everything that a config fixes before anything runs, from the config and the model's config.json alone."""

import msgspec

from common.config.schema import Config, SftConfig
from launch.plan.architecture import Architecture
from launch.plan.arithmetic import (
    Batch,
    Engine,
    Publish,
    Window,
    batch_of,
    checkpoint_bytes,
    engine_of,
    publish_of,
    window_of,
)
from launch.plan.memory import ITEM_BYTES, Activations, Resident, activations, resident
from launch.plan.parameters import count, count_active
from launch.plan.process_groups import GroupKind, Sizes, group_kinds, stage_chunks


class Stage(msgspec.Struct, frozen=True):
    """One rank of a pipeline stage; bytes on the device, but for `host`."""

    layers: list[tuple[int, int]]  # [first, one past the last] of each virtual stage
    embedding: bool
    output: bool
    resident: Resident
    activations: Activations
    training: int  # at the peak of forward and backward
    updating: int  # during the optimizer step
    waiting: int  # between steps
    peak: int  # the larger of training and updating
    host: int  # offloaded gradients are not kept, they start at zero


class Checkpoint(msgspec.Struct, frozen=True):
    bytes: int
    kept: int  # checkpoints on the disk at once, the one being written included


class RlPart(msgspec.Struct, frozen=True):
    window: Window
    publish: Publish
    engine: Engine
    nodes: int


class Plan(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    model: Architecture
    parameters: int  # those of the whole model
    active_parameters: int  # those that one token passes through
    sizes: Sizes
    gpus_per_node: int
    groups: list[GroupKind]  # process groups of the learner
    stages: list[Stage]  # by pipeline rank
    batch: Batch
    checkpoint: Checkpoint
    rl: RlPart | None

    @property
    def fullest(self) -> Stage:
        """The stage whose ranks need the most device memory."""
        return max(self.stages, key=lambda stage: stage.peak)


def make_plan(config: Config | SftConfig, model: Architecture, gpus_per_node: int, lookahead_groups: int) -> Plan:
    """Plan a config whose layout fits the model (common.config.parallel_layout has no problem with it).

    A machine has `gpus_per_node` consecutive learner ranks; a node leases `lookahead_groups` beyond its concurrency.
    """
    learner, dtype = config.learner, config.model.dtype
    sizes = Sizes.of(learner.world_size, learner.parallel)
    batch = batch_of(config, sizes)
    rl = None
    if isinstance(config, Config):
        window = window_of(config, model, lookahead_groups)
        rl = RlPart(window, publish_of(config, model), engine_of(config, model), config.rollout.nodes)
    return Plan(
        name=config.run.name,
        dtype=dtype,
        model=model,
        parameters=count(model),
        active_parameters=count_active(model),
        sizes=sizes,
        gpus_per_node=gpus_per_node,
        groups=group_kinds(sizes, gpus_per_node, model.experts is not None),
        stages=_stages(config, model, sizes, batch.microbatches),
        batch=batch,
        checkpoint=Checkpoint(checkpoint_bytes(model, dtype), learner.checkpoint.keep + 1),
        rl=rl,
    )


def _stages(config: Config | SftConfig, model: Architecture, sizes: Sizes, microbatches: int) -> list[Stage]:
    learner, dtype = config.learner, config.model.dtype
    parallel, memory = learner.parallel, learner.memory
    chunks = stage_chunks(model.layers, parallel)
    tokens, item = learner.micro_batch_tokens, ITEM_BYTES[dtype]
    flowing = activations(model, parallel, memory, tokens, microbatches, item)
    reference = isinstance(config, Config) and config.learner.loss.kl_coefficient > 0
    out: list[Stage] = []
    for i, (r, a) in enumerate(zip(resident(model, parallel, sizes, dtype), flowing, strict=True)):
        parameters = r.parameters if memory.offload_parameters else 0
        gradients = r.gradients if memory.offload_gradients else 0
        optimizer = r.optimizer if memory.offload_optimizer else 0
        updating = r.parameters + r.gradients + r.optimizer
        training = updating - optimizer + a.layers + a.recomputed + a.output
        out.append(
            Stage(
                layers=[(layers.start, layers.stop) for layers in chunks[i]],
                embedding=i == 0,
                output=i == len(chunks) - 1,
                resident=r,
                activations=a,
                training=training,
                updating=updating,
                waiting=updating - parameters - gradients - optimizer,
                peak=max(training, updating),
                host=parameters + optimizer + (r.parameters if reference else 0),
            )
        )
    return out
