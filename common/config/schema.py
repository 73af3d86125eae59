"""The config schema of an RL job: frozen structs, unknown keys forbidden, ranges on every number.

Loading, overrides and error messages are in common/config/loading.py; checks that need more than one
key are in common/config/checks.py. A fact is stored once; what follows from it is a property.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Bounds keep every number finite, and every integer exact where it travels as a float. Messages leave them out.
MOST_INTEGER = 1 << 53
MOST_FLOAT = 1e300
Integer = Annotated[int, Meta(ge=-MOST_INTEGER, le=MOST_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=MOST_INTEGER)]
Natural = Annotated[int, Meta(ge=0, le=MOST_INTEGER)]
Number = Annotated[float, Meta(ge=-MOST_FLOAT, le=MOST_FLOAT)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # more than a billion overflows clocks
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0, le=MOST_FLOAT)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=MOST_FLOAT)]
Text = Annotated[str, Meta(min_length=1)]
Scalar = str | Integer | Number | bool
AddressSpace = Annotated[
    int, Meta(ge=32, le=MOST_INTEGER)
]  # MiB; measured: a Python process starts with 32, and not with 24
AUTO_FACTOR = 2  # rollout.concurrency: auto goes up to this many times rollout.engine.max_num_seqs
Recompute = Literal["none", "selective", "full"]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every config struct."""


class RunConfig(Strict, frozen=True, kw_only=True):
    name: Text  # of the run in logs and reports and, with Redis, in its keys
    dir: Text  # the run folder RUN: config, metrics, events, store, checkpoints, logs, the final model
    seed: Natural = 0  # of the dataset's order, of sampling and of environments
    steps: Positive  # optimizer steps of the whole run
    max_restarts: Natural = 3  # times `up` restarts a crashed role before it gives up


class ModelConfig(Strict, frozen=True, kw_only=True):
    path: Text  # Hugging Face folder: config.json, safetensors, tokenizer
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # parameters of learner and engine
    verify: bool = True  # compare Megatron's forward pass with Hugging Face's when the model is loaded


class LimitsConfig(Strict, frozen=True, kw_only=True):
    """What environments may take; None: what their class says (docs/environments.md)."""

    reset_s: Seconds | None = None  # building an environment and its first observation
    step_s: Seconds | None = None  # each of its answers
    observation_chars: Positive | None = None  # of one observation
    max_concurrent: Positive | None = None  # episodes at once on a node
    process: bool | None = None  # every episode in a process of its own
    cpu_s: Positive | None = None  # CPU seconds of that process, over the whole episode
    memory_mib: AddressSpace | None = None  # address space of that process
    python: Text | None = None  # interpreter of that process, for libraries that do not fit the node's


class TasksConfig(Strict, frozen=True, kw_only=True):
    environment: Text  # built-in name or 'module:Class'; docs/environments.md
    dataset: Text  # JSONL, one problem per line
    eval_dataset: str | None = None  # held-out JSONL of `slipstream eval`
    options: dict[str, Scalar] = {}  # keyword arguments of the environment
    limits: LimitsConfig = LimitsConfig()
    shuffle: bool = True  # every epoch in an order of its own; false: as in the file
    max_attempts: Positive = 3  # failures after which a task is given up; docs/delivery.md


class ParallelConfig(Strict, frozen=True, kw_only=True):
    tensor: Positive = 1  # ranks that share each matrix
    pipeline: Positive = 1  # stages, one behind the other; docs/layouts.md
    virtual_pipeline: Positive = 1  # pieces of the model that each stage holds
    context: Positive = 1  # ranks that share each sequence
    expert: Positive = 1  # ranks over which the experts are spread
    expert_tensor: Positive = 1  # ranks that share each matrix of an expert
    sequence: bool = True  # sequence parallelism wherever tensor > 1
    first_stage_layers: Positive | None = None  # layers of the first pipeline stage; unset: as many as the others
    last_stage_layers: Positive | None = None  # the same of the last stage

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense model and one sequence: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context


class OptimizerConfig(Strict, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-6  # highest learning rate
    beta1: Fraction = 0.9  # Adam's decay of the mean gradient
    beta2: Fraction = 0.95  # and of the mean squared gradient
    eps: PositiveFloat = 1e-8  # added to the root of the latter
    weight_decay: NonNegativeFloat = 0.0  # decoupled; norms and biases have none
    grad_clip: NonNegativeFloat = 1.0  # largest norm of all gradients together; 0 turns clipping off
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of the learning rate after the warm-up
    warmup_steps: Natural = 0  # over which the learning rate rises in equal parts
    decay_steps: Natural = 0  # step at which the schedule ends; 0: run.steps
    min_lr_fraction: Fraction = 0.0  # of lr, where the schedule ends


class LossConfig(Strict, frozen=True, kw_only=True):
    """Bounds that are None take their default from common/config/loss_defaults.py; see docs/algorithms.md."""

    objective: Literal["ppo_clip", "cispo", "gspo", "dppo_tv"] = "ppo_clip"  # docs/algorithms.md
    # how the rewards of a group become advantages
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    clip_low: PositiveFloat | None = None  # bound of the objective below; unset: its default
    clip_high: PositiveFloat | None = None  # bound of the objective above
    clip_dual: AboveOne | None = None  # bound of ppo_clip where advantages are negative
    )
    proximal: Literal["recompute", "behavior", "loglinear"] = "recompute"  # policy around which the update is bounded
    # of tokens that another version or other arithmetic sampled
    correction: Literal["none", "tis", "icepop", "mis"] = "tis"
    # whose ratio decides: the token's, the sample's, or its geometric mean
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    correction_low: PositiveFloat | None = None  # bound of the weight below; unset: the correction's default
    correction_cap: PositiveFloat | None = None  # bound of the weight above
    correction_normalize: bool = False  # divide by the batch's mean weight
    correction_veto: PositiveFloat | None = None  # a sample with a token's weight below it leaves the loss
    kl_coefficient: NonNegativeFloat = 0.0  # of the divergence from the reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of that divergence
    reference: Text | None = None  # Hugging Face folder of the reference model; unset: model.path
    entropy_coefficient: NonNegativeFloat = 0.0  # of the entropy bonus
    reduction: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"  # what the loss is averaged over


class MemoryConfig(Strict, frozen=True, kw_only=True):
    recompute: Recompute = "none"  # activations computed again in the backward pass
    offload_optimizer: bool = False  # states and main parameters in host memory while not in use
    offload_gradients: bool = False  # likewise
    offload_parameters: bool = False  # likewise


class MoeConfig(Strict, frozen=True, kw_only=True):
    freeze_router: bool = False  # routers are not trained
    balance: Literal["none", "aux_loss", "bias"] = "none"  # how the load of experts is evened out
    balance_rate: NonNegativeFloat = 1e-3  # coefficient of aux_loss; step of the experts' bias
    replay_routing: bool = False  # train with the experts that the engine routed each token to


class CheckpointConfig(Strict, frozen=True, kw_only=True):
    every: Positive = 20  # steps; commits are tied to it
    keep: Positive = 2  # newest checkpoints that stay on the disk
    asynchronous: bool = True  # written behind the next steps; committed when it is on the disk


class LearnerConfig(Strict, frozen=True, kw_only=True):
    world_size: Positive = 1  # learner ranks in all
    threads: Positive = 1  # CPU threads per rank
    groups_per_step: Positive = 16  # prompts of one optimizer step
    micro_batch_tokens: Positive = 16384  # packed places of one forward and backward pass
    dynamic_sampling: bool = False  # a step takes further groups in place of those whose rewards are all equal
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    moe: MoeConfig = MoeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.parallel.model_ranks


class EngineConfig(Strict, frozen=True, kw_only=True):
    max_model_len: Positive = 2048  # tokens of one sequence, prompt included
    max_num_seqs: Positive = 256  # sequences that the engine computes at once
    max_batched_tokens: Positive | None = None  # tokens of one engine step; unset: vLLM's default
    kv_cache_mib: Positive | None = None  # size of the KV cache; unset: from gpu_memory_utilization
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9  # share of a GPU that the engine may take
    tensor_parallel: Positive = 1  # devices of one engine
    eager: bool = False  # without compilation and CUDA graphs
    block_size: Positive | None = None  # tokens of one block of the KV cache; unset: vLLM's default


class RolloutConfig(Strict, frozen=True, kw_only=True):
    nodes: Natural = 1  # nodes that `up` starts
    group_size: Positive = 8  # samples per prompt
    max_tokens: Positive = 1024  # sampled tokens per episode
    max_turns: Positive = 1  # generate calls per episode
    temperature: PositiveFloat = 1.0  # of sampling in training
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # 1 in training
    concurrency: Positive | Literal["auto"] = 128  # episodes in flight per node; auto: as the KV cache allows
    sample_timeout_s: Seconds = 600.0  # bound on one episode, which then fails with a reason
    threads: Positive = 1  # CPU threads of the engine
    engine: EngineConfig = EngineConfig()

    @property
    def concurrency_bounds(self) -> tuple[int, int]:
        """Fewest and most episodes in flight; equal unless `concurrency` is auto.

        Episodes that wait for their environment are in flight and not in the engine, hence more than max_num_seqs.
        """
        if self.concurrency == "auto":
            return self.group_size, max(self.group_size, AUTO_FACTOR * self.engine.max_num_seqs)
        return self.concurrency, self.concurrency


class BrokerConfig(Strict, frozen=True, kw_only=True):
    backend: Literal["zeromq", "redis"] = "zeromq"  # the embedded broker, or a Redis server
    address: Text = "tcp://127.0.0.1:0"  # port 0: a free one, written to RUN/broker.json; redis: docs/redis.md
    credentials: Text | None = None  # folder of `slipstream keys`; needed beyond loopback
    durability: Literal["fsync", "everysec", "memory"] = "fsync"  # when the broker's word holds; docs/delivery.md
    retain_steps: Natural = 16  # committed steps whose groups are kept for `slipstream replay`
    max_bytes: Positive = 4 << 30  # of groups that the broker holds; nodes wait while it is full
    max_message_bytes: Positive = 1 << 30  # of one message: no group may be larger
    lease_s: Seconds = 60.0  # a node that is silent for so long loses its tasks
    max_lease_s: Seconds = 3600.0  # heartbeats renew a lease no longer than this: bounds a node that never finishes
    heartbeat_s: Seconds = 2.0  # how often nodes report


class WeightsConfig(Strict, frozen=True, kw_only=True):
    # what the learner sends over and a node receives over; relay always works; docs/weights.md
    transport: Literal["gloo", "nccl", "relay"] = "gloo"
    address: Text = "127.0.0.1"  # interface that the learner's weight plane binds
    publish_every: Positive = 1  # steps from one published version to the next
    timeout_s: Seconds = 20.0  # bound on one publish to one set of nodes
    overlap: bool = True  # false: the learner waits until every node runs the version, at most timeout_s
    bucket_mib: Positive = 8  # piece of a version that is sent and verified by itself
    encoding: Literal["full", "delta"] = "full"  # delta: only what changed, bit for bit; docs/delta.md
    anchor_every: Natural = 64  # publishes, of which one travels whole to everyone; 0: only where a delta does not fit
    kv_cache: Literal["keep", "recompute"] = "keep"  # of requests in flight at a flip; docs/delta.md
    canary_every: Natural = 10  # publishes from one comparison of engine and learner to the next; 0: at start-up only
    canary_tokens: Positive = 32  # of the sequence that is compared
    canary_tolerance: PositiveFloat = 0.5  # largest |difference| of a log-probability


class StalenessConfig(Strict, frozen=True, kw_only=True):
    max: Natural = 2  # versions by which a trained token may be older than its step; 0: synchronous
    # older tokens: leave them out, generate the group again, or let steps wait for their own groups
    expired: Literal["mask", "regenerate", "wait"] = "mask"


class TelemetryConfig(Strict, frozen=True, kw_only=True):
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # of RUN/logs
    refresh_s: Seconds = 1.0  # from one picture of the live view to the next


class Config(Strict, frozen=True, kw_only=True):
    """A whole RL job."""

    run: RunConfig
    model: ModelConfig
    tasks: TasksConfig
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()
    staleness: StalenessConfig = StalenessConfig()
    telemetry: TelemetryConfig = TelemetryConfig()


class SftTasksConfig(Strict, frozen=True, kw_only=True):
    dataset: Text  # JSONL: {"prompt", "completion"}, {"segments": [[text, trained 0|1], ...]} or {"messages": [...]}
    shuffle: bool = True  # every epoch in an order of its own


class SftLearnerConfig(Strict, frozen=True, kw_only=True):
    world_size: Positive = 1
    threads: Positive = 1
    sequences_per_step: Positive = 32  # of one optimizer step
    micro_batch_tokens: Positive = 16384
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    moe: MoeConfig = MoeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig(every=1000, keep=1)

    @property
    def data_parallel(self) -> int:
        return self.world_size // self.parallel.model_ranks


class SftConfig(Strict, frozen=True, kw_only=True):
    """A supervised warm start; RUN/model is the resulting Hugging Face folder."""

    run: RunConfig
    model: ModelConfig
    tasks: SftTasksConfig
    learner: SftLearnerConfig = SftLearnerConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
