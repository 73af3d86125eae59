"""The config schema of an RL job: frozen structs, unknown keys forbidden, ranges on every number.

Loading, overrides and error messages are in common/config/loading.py; checks that need more than one
key are in common/config/checks.py. A fact is stored once; what follows from it is a property.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from common.config.critic import CriticConfig
from common.config.lora import LoraConfig
from common.config.loss_keys import LossConfig
from common.config.observing import (
    EvaluationConfig,
    EvaluationSchedule,
    SftEvaluationConfig,
    TelemetryConfig,
    WatchRule,
)
from common.config.optimizer import OptimizerConfig
from common.config.scorers import ScorerConfig, scorers_of
from common.config.tasks import RowsConfig, SftTasksConfig, TasksConfig
from common.config.types import (
    CollectiveSeconds,
    Natural,
    NonNegative,
    Positive,
    PositiveFloat,
    Seconds,
    Strict,
    Text,
)
from common.errors import ConfigError
from common.metrics import SftMetrics, StepMetrics

AUTO_FACTOR = 2  # rollout.concurrency: auto goes up to this many times rollout.engine.max_num_seqs
Recompute = Literal["none", "selective", "full"]
Reader = Literal["all", "broker", "learner", "node"]  # the role that is about to start


class RunConfig(Strict, frozen=True, kw_only=True):
    name: Text  # Name of the run in logs, reports and Redis keys.
    dir: Text  # The run folder RUN, with config, metrics, events, store, checkpoints, logs and the final model.
    seed: Natural = 0  # Seeds the order of the dataset, sampling and environments. Change it to repeat an experiment.
    steps: Positive  # Steps of the whole run, each of one batch. A finished run continues when it is raised.
    max_restarts: Natural = 3  # How often `up` restarts a role that crashed before the job fails.


class ModelConfig(Strict, frozen=True, kw_only=True):
    # Folder with config.json, safetensors files and a tokenizer, or one of `slipstream convert`.
    # Or a model of the Hugging Face hub, OWNER/NAME or OWNER/NAME@REVISION; docs/models.md.
    path: Text
    # Type of the parameters in learner and engine. Use float32 on CPUs and for tiny models.
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Compares Megatron's forward pass with Hugging Face's at start-up. Turn it off to start faster.
    verify: bool = True
    # A job without a certificate of `slipstream certify` says so, or ends; docs/certificates.md.
    uncertified: Literal["warn", "refuse"] = "warn"


class ParallelConfig(Strict, frozen=True, kw_only=True):
    tensor: Positive = 1  # Ranks that share each matrix. Raise it when a layer does not fit one GPU.
    # Stages of consecutive layers. Raise it when the model does not fit one node; docs/layouts.md.
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1  # Pieces of the model on each stage. Raise it to shorten the pipeline's idle time.
    context: Positive = 1  # Ranks that share each sequence. Raise it for long sequences.
    expert: Positive = 1  # Ranks over which the experts are spread.
    expert_tensor: Positive = 1  # Ranks that share each matrix of an expert.
    sequence: bool = True  # Sequence parallelism wherever tensor > 1. It saves activation memory.
    # Layers of the first pipeline stage. Unset, it gets as many as the others.
    first_stage_layers: Positive | None = None
    # Layers of the last pipeline stage. Unset, it gets as many as the others.
    last_stage_layers: Positive | None = None

    @property
    def sequence_parallel(self) -> bool:
        return self.sequence and self.tensor > 1

    @property
    def model_ranks(self) -> int:
        """Ranks that share one copy of the dense model and one sequence: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context


class MemoryConfig(Strict, frozen=True, kw_only=True):
    # Computes activations again in the backward pass. Raise it when activations do not fit.
    recompute: Recompute = "none"
    # Keeps optimizer states and main parameters in host memory while they are not in use.
    offload_optimizer: bool = False
    offload_gradients: bool = False  # Keeps gradients in host memory while they are not in use.
    offload_parameters: bool = False  # Keeps parameters in host memory while they are not in use.


class MoeConfig(Strict, frozen=True, kw_only=True):
    freeze_router: bool = False  # Does not train the routers.
    balance: Literal["none", "aux_loss", "bias"] = "none"  # How the load of the experts is balanced.
    balance_rate: NonNegative = 1e-3  # Coefficient of aux_loss, or step of the experts' bias.
    replay_routing: bool = False  # Trains each token with the experts that the engine chose for it.


class MegatronConfig(Strict, frozen=True, kw_only=True):
    # Fields of Megatron's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig; docs/layouts.md.
    extra: dict[str, Any] = {}


class CheckpointConfig(Strict, frozen=True, kw_only=True):
    every: Positive = 20  # Steps between checkpoints. Groups are committed with them; docs/delivery.md.
    # Folder of the checkpoints, which every machine of the learner must share. Unset, it is RUN/checkpoints.
    dir: Text | None = None
    keep: Positive = 2  # Number of newest checkpoints that stay on the disk.
    asynchronous: bool = True  # Writes checkpoints while the next steps run. A commit still waits for the disk.
    # Metric whose best checkpoint stays besides the newest ones; -METRIC where less is better. The file best.json names
    # it. A metric of docs/metrics.md counts as its mean over the last `every` steps. evaluation/DATASET/mean_reward and
    # evaluation/DATASET/pass_at/K are those of the checkpoint's own version. `slipstream export --best` writes it.
    keep_best: Text | None = None


class RanksConfig(Strict, frozen=True, kw_only=True):
    """The keys that every learner has, of an RL job or of a warm start."""

    step_key: ClassVar[str]  # Name of the key that says how many rows one step takes.

    world_size: Positive = 1  # Number of learner ranks.
    machines: Positive = 1  # Machines of the learner; each runs world_size / machines ranks. docs/machines.md.
    # Longest wait for that many machines, at the start and after one was lost.
    machines_wait_s: Seconds = 600.0
    # Network interface of the ranks, or several with commas between them. Unset, the one that routes to the broker.
    interface: Text | None = None
    threads: Positive = 1  # CPU threads of each rank.
    # Limit of every collective of the ranks. Raise it if one rank may keep the others waiting for longer.
    timeout_s: CollectiveSeconds = 300.0
    # Packed tokens of one forward and backward pass. Lower it when activations do not fit.
    micro_batch_tokens: Positive = 16384
    parallel: ParallelConfig = ParallelConfig()
    # Reduces gradients while the backward pass runs, and gathers parameters while the next forward pass does.
    overlap: bool = True
    megatron: MegatronConfig = MegatronConfig()
    memory: MemoryConfig = MemoryConfig()
    moe: MoeConfig = MoeConfig()
    lora: LoraConfig | None = None  # Trains adapters of low rank instead of the weights; docs/lora.md.
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def reference(self) -> str | None:
        """The reference model of the loss, where it is another than model.path."""
        return None

    @property
    def value_model(self) -> CriticConfig | None:
        """The critic, which only an RL job may have."""
        return None

    @property
    def rows_per_step(self) -> int:
        """Rows of the dataset that one step takes."""
        return getattr(self, self.step_key)

    @property
    def updates(self) -> int:
        """Optimizer updates of one step."""
        return 1


class LearnerConfig(RanksConfig, frozen=True, kw_only=True):
    step_key = "groups_per_step"

    groups_per_step: Positive = 16  # Prompts of one step.
    # Times that a step trains on its batch. Raise it where samples cost more than training.
    epochs: Positive = 1
    # Optimizer updates of each epoch, each on as many whole groups; docs/algorithms.md.
    minibatches: Positive = 1
    dynamic_sampling: bool = False  # Replaces groups whose rewards are all equal by further groups.
    loss: LossConfig = LossConfig()
    critic: CriticConfig | None = None  # Trains a value model beside the policy, for advantage: gae; docs/critic.md.

    @property
    def reference(self) -> str | None:
        return self.loss.reference

    @property
    def value_model(self) -> CriticConfig | None:
        return self.critic

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches


class EngineConfig(Strict, frozen=True, kw_only=True):
    max_model_len: Positive = 2048  # Tokens of one sequence, prompt included.
    max_num_seqs: Positive = 256  # Sequences that the engine computes at once.
    max_batched_tokens: Positive | None = None  # Tokens of one engine step. Unset, vLLM's default applies.
    kv_cache_mib: Positive | None = None  # Size of the KV cache. Unset, gpu_memory_utilization decides.
    # Share of a GPU's memory that the engine may take.
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    tensor_parallel: Positive = 1  # Devices that share each matrix. Raise it when the model does not fit one GPU.
    pipeline_parallel: Positive = 1  # Stages of consecutive layers, of tensor_parallel devices each.
    expert_parallel: bool = False  # Gives each of the tensor_parallel devices whole experts instead of parts of all.
    eager: bool = False  # Runs without compilation and CUDA graphs. It starts faster and generates more slowly.
    block_size: Positive | None = None  # Tokens of one block of the KV cache. Unset, vLLM's default applies.
    # Each node rounds its weights: fp8_per_channel halves their memory and changes log-probabilities.
    # Use it with a correction; docs/quantization.md.
    quantization: Text | None = None
    extra: dict[str, Any] = {}  # Keyword arguments of vLLM's EngineArgs that no key here sets; docs/layouts.md.

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def dtype(self, published: str) -> str:
        """That the engine computes in, when `published` is the learner's; 8 bits need bfloat16 beside them."""
        return published if self.quantization is None else "bfloat16"


class RolloutConfig(Strict, frozen=True, kw_only=True):
    nodes: Natural = 1  # Nodes that `up` starts. `slipstream rollout --join` adds others.
    group_size: Positive = 8  # Samples per prompt.
    max_tokens: Positive = 1024  # Sampled tokens per episode, over all turns.
    # Generate calls per episode. Unset, the environment or the agent says when an episode is over.
    max_turns: Positive | None = None
    temperature: PositiveFloat = 1.0  # Sampling temperature in training.
    # Nucleus sampling. Training needs 1: other values bias the importance ratios.
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # Episodes in flight per node; auto adapts it to the KV cache (docs/scheduling.md).
    concurrency: Positive | Literal["auto"] = 128
    sample_timeout_s: Seconds = 600.0  # Longest duration of one episode, which then fails with a reason.
    # Seconds in which a node that drains may finish its groups. Raise it where machines are taken back with notice.
    drain_s: Seconds = 10.0
    threads: Positive = 1  # CPU threads of the engine.
    engine: EngineConfig = EngineConfig()

    @property
    def concurrency_bounds(self) -> tuple[int, int]:
        """Fewest and most episodes in flight; equal unless `concurrency` is auto.

        Episodes that wait for their environment are in flight but not in the engine, so max_num_seqs may be exceeded.
        """
        if self.concurrency == "auto":
            return self.group_size, max(self.group_size, AUTO_FACTOR * self.engine.max_num_seqs)
        return self.concurrency, self.concurrency


class BrokerAddress(Strict, frozen=True, kw_only=True):
    # Where the broker listens; port 0 picks a free one. A list has one entry per broker that may lead; docs/redis.md.
    address: Text | list[Text] = "tcp://127.0.0.1:0"
    credentials: Text | None = None  # folder of `slipstream keys`; needed beyond loopback

    @property
    def addresses(self) -> tuple[str, ...]:
        """`address` as a list."""
        return (self.address,) if isinstance(self.address, str) else tuple(self.address)

    @property
    def reaches_standbys(self) -> bool:
        """Whether another machine's broker could go on with this one's store."""
        return False


class BrokerConfig(BrokerAddress, frozen=True, kw_only=True):
    store: Literal["file", "redis"] = "file"  # Use redis if you run it already, or need standby brokers.
    redis: Text | None = None  # Address of the server, redis://, rediss:// or unix://; docs/redis.md.
    # A promise waits for fsync, for a write that is synced every second, or for no disk at all; docs/delivery.md.
    durability: Literal["fsync", "everysec", "memory"] = "fsync"
    retain_steps: Natural = 16  # Committed steps whose groups are kept for `slipstream replay`.
    # Bytes of groups that the broker keeps; nodes wait while it is full. null: what the window needs, 4 GiB or more.
    max_bytes: Positive | None = None
    memory_bytes: Positive = 4 << 30  # Bytes of them in the broker's memory. It reads the rest from the store.
    max_message_bytes: Positive = 1 << 30  # Bytes of one message. No group may be larger.
    lease_s: Seconds = 60.0  # A node that is silent for this long loses its tasks.
    max_lease_s: Seconds = 3600.0  # Longest lease that heartbeats renew. It bounds a node that never finishes a group.
    heartbeat_s: Seconds = 2.0  # Seconds between the reports of a node.

    @property
    def reaches_standbys(self) -> bool:
        return self.store == "redis"


class WeightsConfig(Strict, frozen=True, kw_only=True):
    # How versions reach the nodes. A node that cannot use it falls back to relay; docs/weights.md.
    transport: Literal["gloo", "nccl", "relay"] = "gloo"
    address: Text = "127.0.0.1"  # Interface that the learner's weight plane binds.
    # trusted lets gloo and nccl leave this machine: set it on a private network only; docs/security.md.
    network: Literal["untrusted", "trusted"] = "untrusted"
    publish_every: Positive = 1  # Steps from one published version to the next.
    timeout_s: Seconds = 20.0  # Least bound on one publish to one set of nodes; docs/weights.md.
    overlap: bool = True  # False makes the learner wait, at most timeout_s, until every node runs the version.
    bucket_mib: Positive = 8  # Size of the pieces in which a version is broadcast and verified; not by relay.
    # Where the learner and engines of one device keep versions; device saves the way through the host, with nccl.
    buffers: Literal["host", "device"] = "host"
    # delta sends only changed elements (docs/delta.md), adapter only the matrices of learner.lora (docs/lora.md).
    encoding: Literal["full", "delta", "adapter"] = "full"
    # Every so many publishes are sent whole to all nodes; 0: only where a delta does not fit.
    anchor_every: Natural = 64
    # A flip keeps the KV cache of running requests, of running episodes, or recomputes it; docs/delta.md.
    kv_cache: Literal["keep", "keep_episode", "recompute"] = "keep"
    canary_every: Natural = 10  # Publishes between two comparisons of engine and learner; 0: only at start-up.
    canary_tokens: Positive = 32  # Tokens of the sequence that is compared.
    # Largest difference of a log-probability that the comparison accepts; the mean one with quantization. In bfloat16
    # sound weights were seen to differ by 0.46.
    canary_tolerance: PositiveFloat = 1.0


class StalenessConfig(Strict, frozen=True, kw_only=True):
    max: Natural = 2  # Versions by which a trained token may be older than its step; 0 is synchronous training.
    # Older tokens leave the loss, their group is generated again, or the step waits for its own groups.
    expired: Literal["mask", "regenerate", "wait"] = "mask"
    # Updates by which a token may be older than the update that trains on it. Older tokens leave that update's loss.
    # Unset, only `max` bounds the age.
    max_updates: Natural | None = None


class BaseConfig(Strict, frozen=True, kw_only=True):
    """The sections that every run of the learner has, an RL job or a supervised warm start."""

    role: ClassVar[str]  # Name of the learner's role in commands and logs.
    kind: ClassVar[str]  # The kind of run in a message.
    step_metrics: ClassVar[type[StepMetrics] | type[SftMetrics]]  # The metrics line of a step.

    run: RunConfig
    model: ModelConfig
    tasks: RowsConfig
    learner: RanksConfig = RanksConfig()
    broker: BrokerAddress = BrokerAddress()
    telemetry: TelemetryConfig = TelemetryConfig()
    evaluation: EvaluationSchedule = EvaluationSchedule()

    @property
    def rl(self) -> "Config | None":
        """This config if it is an RL job's; a warm start has no fleet, no weight plane and no store."""
        return None

    @property
    def served(self) -> "Config":
        """The job that the run's broker serves."""
        raise NotImplementedError

    @property
    def rollout_nodes(self) -> int:
        """Nodes that `up` starts."""
        return 0

    @property
    def devices(self) -> int:
        """Devices of learner and `rollout_nodes` together."""
        return self.learner.world_size

    def validate(self, file: str, reader: Reader = "all") -> None:
        """Raise ConfigError, naming `file`, on the first thing that cannot work together.

        `reader` is the role that is about to start here; files that only others read may be missing.
        """
        from common.config.checks import problems  # the checks know every section

        for problem in problems(self, reader):
            raise ConfigError.of(file, problem)


class Config(BaseConfig, frozen=True, kw_only=True):
    """A whole RL job."""

    role = "learner"
    kind = "an RL job"
    step_metrics = StepMetrics

    tasks: TasksConfig
    learner: LearnerConfig = LearnerConfig()
    rollout: RolloutConfig = RolloutConfig()
    broker: BrokerConfig = BrokerConfig()
    weights: WeightsConfig = WeightsConfig()
    staleness: StalenessConfig = StalenessConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    watch: list[WatchRule] = []  # docs/watch.md
    scorers: dict[str, ScorerConfig] = {}  # Judges, reward models and teachers by name; docs/scorers.md.

    @property
    def sources(self) -> dict[str, "Config"]:
        """The job of each source by its name, as if it had no other source; {'': this one} without tasks.sources."""
        return {name: self._only(name) for name in self.tasks.sources} or {"": self}

    def _only(self, name: str) -> "Config":
        own = self.tasks.sources[name]
        given = {key: getattr(own, key) for key in ("max_tokens", "max_turns", "advantage", "kl_coefficient")}
        changed = {key: value for key, value in given.items() if value is not None}
        if own.advantage is not None or own.advantage_options:  # another estimator's options are not its own
            changed["advantage_options"] = own.advantage_options
        loss = {key: value for key, value in changed.items() if key in LossConfig.__struct_fields__}
        tasks = self.tasks.only(name)
        return msgspec.structs.replace(
            self,
            tasks=tasks,
            rollout=msgspec.structs.replace(self.rollout, **{k: v for k, v in changed.items() if k not in loss}),
            learner=msgspec.structs.replace(self.learner, loss=msgspec.structs.replace(self.learner.loss, **loss)),
            scorers={key: self.scorers[key] for key in sorted(scorers_of(tasks))},
        )

    @property
    def measures_kl(self) -> bool:
        """Whether the loss of any source or the reward has a KL term, which takes a reference model."""
        critic = self.learner.critic
        own = critic is not None and critic.kl_coefficient > 0
        return own or any(job.learner.loss.kl_coefficient for job in self.sources.values())

    @property
    def rl(self) -> "Config":
        return self

    @property
    def served(self) -> "Config":
        return self

    @property
    def rollout_nodes(self) -> int:
        return self.rollout.nodes

    @property
    def devices(self) -> int:
        return super().devices + self.rollout.nodes * self.rollout.engine.devices

    @property
    def device_shares(self) -> dict[str, int]:
        """The devices of each role of `up`, in the order in which the roles get them."""
        nodes = {f"node-{i}": self.rollout.engine.devices for i in range(self.rollout.nodes)}
        return {"learner": self.learner.world_size} | nodes


class SftLearnerConfig(RanksConfig, frozen=True, kw_only=True):
    step_key = "sequences_per_step"

    sequences_per_step: Positive = 32  # Sequences of one optimizer step.
    checkpoint: CheckpointConfig = CheckpointConfig(every=1000, keep=1)


class SftConfig(BaseConfig, frozen=True, kw_only=True):
    """A supervised warm start; RUN/model is the resulting Hugging Face folder. Only several machines have a broker."""

    role = "sft"
    kind = "a warm start (sft)"
    step_metrics = SftMetrics

    tasks: SftTasksConfig
    learner: SftLearnerConfig = SftLearnerConfig()
    evaluation: SftEvaluationConfig = SftEvaluationConfig()

    @property
    def served(self) -> Config:
        """The job of a broker that forms the rounds of this warm start's machines; it has no groups and no store."""
        tasks = TasksConfig(environment="none", dataset=self.tasks.dataset)
        broker = BrokerConfig(address=self.broker.address, credentials=self.broker.credentials, durability="memory")
        return Config(run=self.run, model=self.model, tasks=tasks, broker=broker, telemetry=self.telemetry)
