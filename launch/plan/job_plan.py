"""Everything that a config fixes before anything runs, from the config and the model's config.json alone.

A step, the window, a published version, a checkpoint, the memory of an engine and of every pipeline stage.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat
from math import inf, prod

import msgspec
import numpy as np

from common.config.architecture import Architecture, Attention
from common.config.group_size import group_bytes, routing_bytes
from common.config.lora import PROJECTIONS, LoraConfig
from common.config.parallel_layout import padded
from common.config.schema import BaseConfig, Config, MemoryConfig, RanksConfig
from common.weights.wire.layout import ALIGNMENT, DEPTH_SHARE, Layout, publish_bound
from launch.plan.layout import (
    GroupKind,
    Sizes,
    count,
    count_active,
    count_adapters,
    group_kinds,
    hf_tensors,
    stage_chunks,
)
from launch.plan.load_time import Start, start_of
from launch.plan.memory import ADAM_BYTES, ITEM_BYTES, Activations, Resident, activations, resident
from learner.batch.balance import balance
from rollout_fleet.node.node import LOOKAHEAD_GROUPS

GIB, MIB = 1 << 30, 1 << 20
MAIN_PARAMETER_BYTES = 4  # saved with the optimizer, whatever the model's dtype
SCALE_BYTES = 4  # float32, one for each row of a rounded matrix
DEVICE_VERSIONS = 3  # published versions that the lead rank keeps in device memory at most


class Batch(msgspec.Struct, frozen=True):
    """One step when every sequence is as long as it may be."""

    sequences: int  # samples, or documents in supervised tuning
    longest: int  # tokens of one sequence, padding of context parallelism included
    tokens: int  # those of all sequences
    tokens_per_rank: int  # those on the data-parallel rank with the most
    updates: int  # optimizer updates
    microbatches: int  # those of one update, on every data-parallel rank
    bubble: float  # share of an update that a pipeline stage idles, with that many microbatches
    bubble_short: float  # the same when sequences are a quarter as long


class Window(msgspec.Struct, frozen=True):
    """The groups that the staleness bound allows to be outstanding: B (k + 1) (common/staleness.py)."""

    groups: int
    samples: int
    tokens: int
    bytes: int  # size of their samples when every one has the maximum length
    group_bytes: int  # size of one such group, which travels as one message
    node_groups: int  # that one node generates at once
    oldest_updates: int  # most updates by which a token is older than one that trains on it


class Publish(msgspec.Struct, frozen=True):
    """One policy version on its way to the nodes."""

    bytes: int  # size of the flat buffer, which every node keeps in host memory
    adapter_bytes: int  # size of a later version where adapters travel; 0 where whole versions do
    buckets: int  # pieces in which it is sent
    tensors: int
    bytes_per_s: float  # rate at which the first publish just ends within its bound
    sources: int  # ranks that keep a part of it in host memory and send that part
    largest_source_bytes: int
    largest_machine_bytes: int  # those of all sources on the machine with the most
    link_gbit: float  # Gb/s of every machine's link, in each direction
    # The times are those of a whole version, or of adapters where they travel.
    send_s: float  # time that the machine with the most needs to send its parts once
    publish_s: float  # a node's link bounds it: about so long over the relay, at least so long over gloo and nccl


class Engine(msgspec.Struct, frozen=True):
    """One vLLM engine's memory, per device."""

    devices: int
    weight_bytes: int
    cache_bytes_per_token: float  # keys and values
    cache_bytes: float  # at most; infinite unless rollout.engine.kv_cache_mib is set

    def cache_tokens(self, device_bytes: float, utilization: float) -> int:
        """Tokens whose keys and values fit beside the weights; 0 when the weights do not fit."""
        room = min(self.cache_bytes, device_bytes * utilization - self.weight_bytes)
        return max(0, int(room / self.cache_bytes_per_token))


class Stage(msgspec.Struct, frozen=True):
    """One rank of a pipeline stage; bytes on the device, but for `host`."""

    layers: list[tuple[int, int]]  # [first, one past the last] of each virtual stage
    embedding: bool
    output: bool
    resident: Resident
    activations: Activations
    versions: int  # published ones with weights.buffers: device, on the stage of the lead rank
    critic: int  # a critic's, while the policy trains; 0 without learner.critic
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
    adapters: int  # parameters of the adapters, which train in the place of the others; 0 without learner.lora
    sizes: Sizes
    gpus_per_node: int
    groups: list[GroupKind]  # process groups of the learner
    stages: list[Stage]  # by pipeline rank
    batch: Batch
    checkpoint: Checkpoint
    start: Start
    rl: RlPart | None

    @property
    def fullest(self) -> Stage:
        """The stage whose ranks need the most device memory."""
        return max(self.stages, key=lambda stage: stage.peak)


def make_plan(config: BaseConfig, model: Architecture, gpus_per_node: int, link_gbit: float) -> Plan:
    """Plan a config whose layout fits the model (common.config.parallel_layout has no problem with it).

    A machine has `gpus_per_node` consecutive learner ranks; a node leases LOOKAHEAD_GROUPS beyond its concurrency.
    Every machine's link carries `link_gbit` Gb/s in each direction.
    """
    learner = config.learner
    sizes = Sizes.of(learner.world_size, learner.parallel)
    rl = None
    if (job := config.rl) is not None:
        rl = RlPart(
            window=window_of(job, model),
            publish=publish_of(job, model, gpus_per_node, link_gbit),
            engine=engine_of(job, model),
            nodes=job.rollout.nodes,
        )
    stages = [*stages_of(config, model, rl.publish.bytes if rl is not None else 0)]
    return Plan(
        name=config.run.name,
        dtype=config.model.dtype,
        model=model,
        parameters=count(model),
        active_parameters=count_active(model),
        adapters=0 if learner.lora is None else count_adapters(model, learner.lora),
        sizes=sizes,
        gpus_per_node=gpus_per_node,
        groups=[*group_kinds(sizes, gpus_per_node, model.experts is not None)],
        stages=stages,
        batch=batch_of(config, sizes),
        checkpoint=Checkpoint(
            bytes=checkpoint_bytes(model, config.model.dtype, learner.lora)
            + (checkpoint_bytes(model, config.model.dtype) if learner.value_model is not None else 0),
            kept=learner.checkpoint.keep + 1 + bool(learner.checkpoint.keep_best),
        ),
        start=start_of((stage.resident for stage in stages), learner.parallel, config.model.dtype),
        rl=rl,
    )


def stages_of(config: BaseConfig, model: Architecture, version_bytes: int) -> Iterator[Stage]:
    """The ranks of each pipeline stage, when a published version has `version_bytes`."""
    learner = config.learner
    parallel, memory = learner.parallel, learner.memory
    dtype = config.model.dtype
    sizes = Sizes.of(learner.world_size, parallel)
    chunks = stage_chunks(model.layers, parallel)
    microbatches = batch_of(config, sizes).microbatches
    tokens = learner.micro_batch_tokens
    entropy = "none"
    if config.rl is not None:  # its metrics have the entropy
        entropy = "trained" if config.rl.learner.loss.entropy_coefficient else "measured"
    flowing = activations(model, parallel, memory, tokens, microbatches, ITEM_BYTES[dtype], learner.lora, entropy)
    held = resident(model, parallel, sizes, dtype, learner.lora)
    critics: Iterable[Resident | None] = repeat(None)
    if learner.value_model is not None:  # counted with an output layer, which it has not
        critics = resident(model, parallel, sizes, dtype)
    on_device = config.rl is not None and config.rl.weights.buffers == "device"
    beneath = learner.lora is not None and learner.reference is None  # the frozen weights are the reference
    reference = config.rl is not None and config.rl.measures_kl and not beneath
    for i, (r, a, critic) in enumerate(zip(held, flowing, critics, strict=False)):
        versions = DEVICE_VERSIONS * version_bytes if on_device and i == 0 else 0
        models = [r] if critic is None else [r, critic]
        kept = [_bytes(each) - sum(_offloaded(each, memory)) for each in models]
        waiting = sum(kept) + versions
        # one of the models works, with everything that it has, while the others wait
        updating = max(waiting - own + _bytes(each) for each, own in zip(models, kept, strict=True))
        passes = (waiting - own + _bytes(x) - _offloaded(x, memory)[2] for x, own in zip(models, kept, strict=True))
        training = max(passes) + a.layers + a.recomputed + a.output
        yield Stage(
            layers=[(chunk.start, chunk.stop) for chunk in chunks[i]],
            embedding=i == 0,
            output=i == len(chunks) - 1,
            resident=r,
            activations=a,
            versions=versions,
            critic=sum(kept[1:]),
            training=training,
            updating=updating,
            waiting=waiting,
            peak=max(training, updating),
            host=sum(sum(_offloaded(x, memory)[::2]) for x in models) + (r.parameters if reference else 0),
        )


def _bytes(model: Resident) -> int:
    return model.parameters + model.gradients + model.optimizer


def _offloaded(model: Resident, memory: MemoryConfig) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer that leave the device while they are not in use."""
    return (
        model.parameters if memory.offload_parameters else 0,
        model.gradients if memory.offload_gradients else 0,
        model.optimizer if memory.offload_optimizer else 0,
    )


def batch_of(config: BaseConfig, sizes: Sizes) -> Batch:
    """One step of documents that are all as long as they may be, packed as the learner packs them."""
    learner = config.learner
    parallel = config.learner.parallel
    bound = learner.micro_batch_tokens
    sequences = learner.rows_per_step
    longest = bound
    if config.rl is not None:
        sequences *= config.rl.rollout.group_size
        longest = config.rl.rollout.engine.max_model_len - 1  # inputs are all tokens but the last
    longest = padded(longest, parallel)
    at_once = sequences
    if config.rl is not None:
        groups = -(-learner.rows_per_step // config.rl.learner.minibatches)
        at_once = groups * config.rl.rollout.group_size
    full = microbatches_of(at_once, longest, sizes.data, bound)
    short = microbatches_of(at_once, padded(max(1, longest // 4), parallel), sizes.data, bound)
    return Batch(
        sequences=sequences,
        longest=longest,
        tokens=sequences * longest,
        tokens_per_rank=-(-sequences // sizes.data) * longest,
        updates=learner.updates,
        microbatches=full,
        bubble=bubble(full, parallel.pipeline, parallel.virtual_pipeline),
        bubble_short=bubble(short, parallel.pipeline, parallel.virtual_pipeline),
    )


@lru_cache  # a proposal tries many layouts of the same batch
def microbatches_of(documents: int, places: int, ranks: int, bound: int) -> int:
    """Microbatches of every rank for so many documents of `places` each; one longer than the bound fills its own."""
    return len(balance(np.full(documents, min(places, bound)), ranks, bound)[0])


def bubble(microbatches: int, pipeline: int, virtual: int) -> float:
    """Idle share of a step: (p - 1) / v over m + (p - 1) / v (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    idle = (pipeline - 1) / virtual
    return idle / (microbatches + idle)


def window_of(config: Config, model: Architecture) -> Window:
    """The window when a node leases LOOKAHEAD_GROUPS beyond its concurrency."""
    groups = config.learner.groups_per_step * (config.staleness.max + 1)
    size = config.rollout.group_size
    each = group_bytes(config, routing_bytes(model))
    node_groups = min(groups, config.rollout.concurrency_bounds[1] // size + LOOKAHEAD_GROUPS)
    oldest = config.learner.updates * (config.staleness.max + 1) - 1
    most = config.staleness.max_updates
    return Window(
        groups=groups,
        samples=groups * size,
        tokens=groups * size * config.rollout.engine.max_model_len,
        bytes=groups * each,
        group_bytes=each,
        node_groups=node_groups,
        oldest_updates=oldest if most is None else min(oldest, most),
    )


def publish_of(config: Config, model: Architecture, gpus_per_node: int, link_gbit: float) -> Publish:
    """The weight plane's flat buffer for this model, the ranks that send it, and the time that it takes."""
    relay = config.weights.transport == "relay"
    link = link_gbit * 1e9 / 8
    layout = Layout.of([(name, config.model.dtype, shape) for name, shape in hf_tensors(model)])
    size = layout.total_bytes
    buckets = -(-size // (config.weights.bucket_mib * MIB))
    adapters = _adapter_bytes(config, layout)  # the lead rank alone sends them, and whole versions beside them
    parts = source_bytes(layout, model, config.learner) if relay and not adapters else {0: size}
    machines: Counter[int] = Counter()
    for rank, part in parts.items():
        machines[rank // gpus_per_node] += part
    largest = max(machines.values())
    return Publish(
        bytes=size,
        adapter_bytes=adapters,
        buckets=buckets,
        tensors=len(layout.entries),
        bytes_per_s=size / publish_bound(config.weights.timeout_s, size),
        sources=len(parts),
        largest_source_bytes=max(parts.values()),
        largest_machine_bytes=largest,
        link_gbit=link_gbit,
        send_s=(adapters or largest) / link,
        publish_s=(adapters or size) / link * (1 + 1 / DEPTH_SHARE if relay else 1),
    )


def _adapter_bytes(config: Config, layout: Layout) -> int:
    """A [rank, in] and B [out, rank] of every matrix; each has an A of its own on the way."""
    lora = config.learner.lora
    if lora is None or config.weights.encoding != "adapter":
        return 0
    names = {name for target in lora.targets for name in PROJECTIONS.get(target, ())}
    shapes = [entry.shape for entry in layout.entries if entry.name.split(".")[-2] in names]
    return ITEM_BYTES[config.model.dtype] * lora.rank * sum(map(sum, shapes))


def source_bytes(layout: Layout, model: Architecture, learner: RanksConfig) -> dict[int, int]:
    """Rank -> bytes that it sends, as learner.megatron.conversion.export divides a model.

    The first rank of a stage sends its dense tensors too. Gaps of alignment count, so all add up to the layout.
    """
    parallel = learner.parallel
    stages = {"embed_tokens": 0}
    for stage, chunks in enumerate(stage_chunks(model.layers, parallel)):
        stages |= {str(layer): stage for layers in chunks for layer in layers}
    here = model.experts.count // parallel.expert if model.experts else 1
    parts: Counter[int] = Counter()
    for entry in layout.entries:
        words = entry.name.split(".")
        stage = stages.get(words[2 if words[1] == "layers" else 1], parallel.pipeline - 1)
        expert = int(words[words.index("experts") + 1]) // here if "experts" in words else 0
        rank = stage * (learner.world_size // parallel.pipeline) + expert * parallel.expert_tensor
        parts[rank] += -(-entry.size_bytes // ALIGNMENT) * ALIGNMENT
    return parts


def checkpoint_bytes(model: Architecture, dtype: str, lora: LoraConfig | None = None) -> int:
    """Size of one checkpoint: parameters that train, float32 main parameters and Adam's two states."""
    trained = count(model) if lora is None else count_adapters(model, lora)
    return trained * (ITEM_BYTES[dtype] + MAIN_PARAMETER_BYTES + ADAM_BYTES)


def engine_of(config: Config, model: Architecture) -> Engine:
    """The memory of one of the fleet's engines; keys and values have the dtype that it computes in."""
    settings = config.rollout.engine
    item = ITEM_BYTES[settings.dtype(config.model.dtype)]
    weights = count(model) * item
    if settings.quantization is not None:  # projections have a byte an element, and a float32 scale for each row
        rounded = [shape for name, shape in hf_tensors(model) if name.endswith("_proj.weight")]
        weights -= sum((item - 1) * prod(shape) - SCALE_BYTES * shape[0] for shape in rounded)
    tensor = settings.tensor_parallel
    a = model.attention
    if isinstance(a, Attention):
        heads = max(a.kv_heads, tensor)  # vLLM copies a key-value head where there are fewer than devices of a stage
        per_layer = 2 * heads * a.head_dim / tensor
    else:
        per_layer = a.kv_rank + a.rope_dim  # the compressed form, whole on every device
    return Engine(
        devices=settings.devices,
        weight_bytes=weights // settings.devices,
        cache_bytes_per_token=per_layer * -(-model.layers // settings.pipeline_parallel) * item,
        cache_bytes=settings.kv_cache_mib * MIB if settings.kv_cache_mib is not None else inf,
    )
