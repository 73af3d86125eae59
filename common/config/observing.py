"""The sections of the config that observe a run: telemetry, evaluation and watch."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.config.types import Fraction, Natural, NonNegative, Number, Positive, PositiveFloat, Seconds, Strict, Text

Sink = Literal["tensorboard", "wandb", "mlflow", "trackio", "prometheus"]


class TelemetryConfig(Strict, frozen=True, kw_only=True):
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # Least severe level that RUN/logs contains.
    refresh_s: Seconds = 1.0  # Seconds between two pictures of the live view.
    # Port on which broker, learner and nodes answer probes without authentication, 0: none. It is on the loopback
    # interface, and with broker.credentials on every one; docs/kubernetes.md.
    health_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    # Share of the episodes whose transcript is kept. The best, worst and longest one of a step always are, and one of
    # each group that failed. The word none turns transcripts off; docs/transcripts.md.
    transcripts: Fraction | Literal["none"] = 0.02
    transcripts_mib: Positive = 256  # Size of RUN/transcripts. The oldest transcripts make room for new ones.
    trace_mib: Natural = 64  # Size of RUN/trace, the timeline of all processes; 0 records none. docs/trace.md.
    sinks: list[Sink] = []  # Trackers that are fed from the files of the run; docs/sinks.md.
    prometheus_port: Annotated[int, Meta(ge=0, le=65535)] = 9464  # Port of the sink prometheus, on this machine only.
    profile_steps: list[Natural] = []  # Steps that torch.profiler and vLLM's profiler record; docs/trace.md.
    profile_ranks: list[Natural] = msgspec.field(default_factory=lambda: [0])  # Learner ranks that record them.
    profile_nodes: list[Text] = []  # Ids of the nodes that record them.


class EvaluationSchedule(Strict, frozen=True, kw_only=True):
    """The key that the evaluations of both kinds of run have."""

    every: Natural = 0


class EvaluationConfig(EvaluationSchedule, frozen=True, kw_only=True):
    every: Natural = 0  # Steps between two evaluations while the job trains; 0: none. docs/evaluation.md.
    # Held-out problems, named like tasks.dataset; of `slipstream eval`, too. With tasks.sources a mapping of names to
    # such lists.
    datasets: list[Text] | dict[str, list[Text]] = []
    samples: Positive = 1  # Episodes per problem. Raise it for pass@k.
    temperature: NonNegative | None = None  # Sampling temperature; 0 is greedy. Unset, rollout.temperature.
    # pool uses only nodes of `slipstream rollout --pool eval`. shared uses the training fleet, which waits meanwhile.
    # Unset, a round uses the pool if one of its nodes is alive, and the training fleet otherwise.
    fleet: Literal["pool", "shared"] | None = None

    @property
    def held_out(self) -> list[tuple[str, str]]:
        """(source, dataset) of all held-out problems; the source is '' in a job of one."""
        named = self.datasets if isinstance(self.datasets, dict) else {"": self.datasets}
        return [(source, dataset) for source, datasets in named.items() for dataset in datasets]

    @property
    def paths(self) -> list[str]:
        return [dataset for _, dataset in self.held_out]


class SftEvaluationConfig(EvaluationSchedule, frozen=True, kw_only=True):
    every: Natural = 0  # Steps between two validations of a warm start; 0: none.
    share: Fraction = 0.05  # Share of the rows that is held out for them, the same rows for every run.seed.


class WatchRule(Strict, frozen=True, kw_only=True):
    """The action when a metric goes astray; docs/watch.md. Exactly one of below, above, drops and spikes is set."""

    metric: Text  # A metric of docs/metrics.md that is one number; docs/watch.md has more.
    below: Number | None = None  # Acts when the metric is below this.
    above: Number | None = None  # Acts when the metric is above this.
    drops: Fraction | None = None  # Acts when its mean over `steps` has lost this share of the best one so far.
    spikes: PositiveFloat | None = None  # Acts when a value exceeds this many times the median of the last 50 steps.
    steps: Positive = 1  # Consecutive steps that it takes.
    # pause stops publishing, stop ends the run after a checkpoint, run starts a command.
    do: Literal["warn", "pause", "stop", "run"] = "warn"
    # Words of the command for do: run. Only a config file on the learner's machine may set it.
    command: list[Text] = []
    timeout_s: Seconds = 60.0  # Longest duration of that command.

    @property
    def upper(self) -> bool:
        """Whether large values are what it is about."""
        return self.above is not None or self.spikes is not None
