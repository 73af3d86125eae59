"""The delivery contract: what a broker promises, and what it and its clients tell each other.

The calls are in broker/client/calls.py. Every backend passes tests/contract/.

States of a task: pending -> leased(node, deadline) -> ready -> taken(step) -> committed, or dead after
`max_attempts` failures or lost leases, of two nodes where two work.

- A lease has a token and a deadline that heartbeats renew, up to `max_lease_s` after it was given: a node that lives
  and never finishes loses it too. A lost lease puts the task back, oldest first.
- `complete` with a token that is no longer current is refused: one task, one accepted group.
- `take(step)` is idempotent: a restarted learner gets the same groups in the same order.
- A group that a step filters stays that step's: it is committed with it, marked in the ledger, and its place in the
  order may pass to the next task, so the step takes another one.
- `commit(step)` releases everything taken by steps <= step; said only when the checkpoint is durable.
- Admission (common/staleness.py) decides which tasks a node may lease.
- The learner is the process with the highest incarnation among those that attach or report. Two processes on one run
  folder, or on a copy of it, have the same incarnation. Then the second is refused while the first is alive, which
  means seen within LOST_AFTER_S and not ended; otherwise it takes over. A replaced learner stays refused.
- Waste is counted under the node that spent it, since the store was made. `lost`: the seconds of a lease that
  is taken back (deadline, bound or restart), the tokens of every result that comes with an old token. `failed`: what a
  `fail` under a current token tells. `filtered`, `regenerated`: `sampled_tokens` and `generation_s` of the group, once.
  A node that comes again under its id goes on counting; what nodes that left had lost stays in the totals.
- A store (what a broker remembers, in memory or on a disk) has a random `store_id` from its making to its end.
- A run has a random `run_id` for good, in its folder. A node that joined another run is refused whatever it asks, and
  so is the report of a learner whose folder is another run's.
- A learner repeats how far the log went when it was last told something. A broker whose log does not go so far, or is
  another one, refuses every request of that learner until it attaches again.
"""

from itertools import pairwise
from math import frexp, fsum, ldexp
from typing import Annotated

import msgspec
from msgspec import Meta

from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from common.rollouts import GroupMeta, Task
from common.staleness import Window
from common.waits import NO_WAIT, WaitFor, WaitKind, sentence
from common.waste import WasteByReason
from common.wire_types import Finite, Name, Seconds, StepNumber, Tally, Text, Version, Weight

LOST_AFTER_S = 10.0  # a learner unseen for longer is lost; it reports about once a second
LEDGER_LINES = 2000  # in one answer; about 10 ms of the broker's time
LEARNER_ENDED = ("done", "drained", "failed")  # states after which a learner says nothing more
NODE_AWAY = ("starting", "joining", "draining", "excluded")  # states of a node that takes no task


class RunInfo(msgspec.Struct, frozen=True):
    """The job's facts, given to the broker at its start."""

    name: str
    run_dir: str
    groups_per_step: int
    max_staleness: int
    max_attempts: int
    lease_s: float
    max_bytes: int  # bound on the groups that are not committed
    config: bytes = b""  # the resolved job config as JSON, handed to nodes that `--join` without one
    max_lease_s: float = 3600.0  # no heartbeat renews a lease beyond this
    trace: bool = False  # whether the broker takes the nodes' spans
    memory_bytes: int = 0  # so much of `max_bytes` is in memory, and the rest only in the store; 0: all of it
    run_id: str = ""  # as in RUN/run_id; '' from a broker of an earlier release

    def check_member(self, run_id: str, who: str) -> None:
        """Raise BrokerError when a node or learner belongs to the run `run_id`, and that is another one.

        This broker may listen at the address of that run's broker, which has ended or never got the address.
        """
        if run_id and self.run_id and run_id != self.run_id:
            serves = f"the broker at this address serves the run {self.name!r} of {self.run_dir}, id {self.run_id}"
            raise BrokerError(f"{serves}; this {who} belongs to the run with id {run_id}")


class WeightRequest(msgspec.Struct, frozen=True):
    """`slipstream set`: these sources get these weights with the next tasks that the learner offers."""

    id: Name  # random
    weights: Annotated[dict[Name, Weight], Meta(min_length=1, max_length=1 << 12)]
    time_s: Finite = 0.0  # Unix time at which the broker got it


class WeightChange(msgspec.Struct, frozen=True):
    """The weights of all sources from one position of the task stream on. The learner makes it, and its list lasts."""

    position: Tally  # the first task with these weights
    weights: dict[Name, Weight]
    factors: dict[Name, Weight] = {}  # those of tasks.curriculum, by which the weights are multiplied; 1 if missing
    requests: list[Name] = []  # ids of the requests that it carries out
    step: StepNumber = -1  # that the curriculum followed last
    time_s: Finite = 0.0

    @property
    def effective(self) -> dict[str, float]:
        return {name: weight * self.factors.get(name, 1.0) for name, weight in self.weights.items()}

    @property
    def shares(self) -> dict[str, float]:
        """The weights in effect, divided by their sum: 1 together, however small the weights are."""
        scale = 1 - frexp(max(self.weights.values()))[1]  # to 1 or more, by a power of two, which rounds nothing
        parts = {name: ldexp(weight, scale) * self.factors.get(name, 1.0) for name, weight in self.weights.items()}
        total = fsum(parts.values())
        return {name: part / total for name, part in parts.items()}


class Lease(msgspec.Struct, frozen=True, gc=False):
    task: Task
    token: str
    attempt: int  # 1 for the first
    lease_s: float  # seconds until the deadline, renewed by each heartbeat
    evaluation: EvaluationOrder | None = None  # the task is a held-out problem of this round, and belongs to no step


class StoredGroup(msgspec.Struct, frozen=True, gc=False):
    """A ready group: meta for bookkeeping, payload = encoded common.rollouts.Group, bytes or a view of bytes.

    On the wire the payload is empty and follows in a frame of its own.
    """

    serial: int
    node_id: str
    meta: GroupMeta
    payload: bytes = b""
    source: str = ""  # the task's
    token: str = ""  # names the lease that it came under, and no other group's; '' from a store of an earlier release
    held: bool = False  # no payload follows: the learner said that it has it


CountByReason = Annotated[dict[Name, Tally], Meta(max_length=64)]


class Delivery(msgspec.Struct, frozen=True):
    """A node that a published version has not reached yet."""

    node_id: Text
    version: Version
    stage: Text  # queued (an earlier broadcast is under way) | receiving (not Staged) | flipping (Staged, not Active)
    since_s: Finite = 0.0  # since the broadcast to it began


class GroupWork(msgspec.Struct, frozen=True):
    """A group that a node works on. `turns` and what follows are those of the episode that is in its state longest."""

    serial: Tally
    samples: Tally  # its episodes
    finished: Tally = 0  # those of them that ended
    age_s: Finite = 0.0  # since it was leased
    tokens: Tally = 0  # sampled for it by calls of the model that ended
    turns: Tally = 0
    episode_tokens: Tally = 0  # likewise by calls that ended
    # queued (it waits for a slot) | engine | environment | scorer; done: all have ended and go to the broker
    state: Text = "queued"
    state_s: Finite = 0.0
    evaluates: Version = -1  # the version that a held-out problem is for; -1: this is a task of training


class EvaluationProgress(msgspec.Struct, frozen=True):
    """The round of evaluation that is under way; it counts problems."""

    version: int
    pending: int
    leased: int
    finished: int
    shared: bool  # the training fleet takes part


class Evaluated(msgspec.Struct, frozen=True):
    known: int  # problems whose results it has not stored; fewer than it offered: the broker has lost its memory
    results: list[EvaluationResult] = []  # some of those that it has not stored


class LearnerReport(msgspec.Struct, frozen=True):
    """The learner's report on itself, sent about once a second and on every change of state."""

    pid: int
    incarnation: int
    # starting | waiting | training | publishing | checkpointing | replaying | stalled | done | drained | failed
    state: Text
    policy_version: Version
    wait: WaitFor = NO_WAIT
    since_s: Finite = 0.0  # seconds in this state
    weights_address: Text = ""  # control endpoint of the weight plane
    step: StepNumber = 0
    instance: Text = ""  # random per process; '' from a learner that does not say
    waste: WasteByReason = {}  # since step 0: failed (samples of groups that were trained on), masked
    groups_missing: Tally = 0  # that the current step waits for, those that are ready included
    deliveries: Annotated[list[Delivery], Meta(max_length=64)] = []  # the oldest ones that are under way
    deliveries_waiting: Tally = 0  # all that are under way
    host: Text = ""  # the lead rank's machine
    alarms: Annotated[list[Text], Meta(max_length=64)] = []  # sentences of watch rules whose metric is not well
    paused: Text = ""  # the sentence of the rule that keeps new versions from the nodes
    run_id: Text = ""  # in its RUN/run_id; '' where it has none
    former_wait: Text = msgspec.field(default="", name="waiting_on")  # a sentence, from a release without `wait`

    @property
    def waiting_on(self) -> str:
        """`wait` in words; a wait for groups that a pause may prolong says so."""
        text = sentence(self.wait) or self.former_wait
        if not self.paused or self.wait.kind != WaitKind.GROUPS:
            return text
        return f"{text}; publishing is paused, `slipstream resume` ends that: {self.paused}"


class LogPosition(msgspec.Struct, frozen=True, gc=False):
    """How far the log went: the `seq`-th record, written by the broker whose start is called `opening`.

    The number alone would not do: a broker that starts with an older copy of the log soon has as many records again.
    """

    opening: Text  # random per start of a broker
    seq: Tally


class Attached(msgspec.Struct, frozen=True):
    """The broker's answer to a learner that (re)starts."""

    next_serial: int  # one past the highest serial ever offered
    store_id: str = ""  # a changed id means that the broker has lost its state
    committed_step: int = -1  # highest one, -1 for none; the groups of steps up to it are gone
    weight_changes: list[WeightChange] = []  # all that came with tasks, oldest first


class Member(msgspec.Struct, frozen=True):
    """A machine of a round of the learner. The first one's endpoint is where the ranks meet."""

    machine: Name
    host: Text
    address: Text
    endpoint: Text


class MachineReport(msgspec.Struct, frozen=True):
    """The report of a launcher of learner ranks, sent about once a second and at every change."""

    machine: Name  # random per launcher
    host: Text
    address: Text  # its ranks use this interface address
    endpoint: Text  # HOST:PORT of the rendezvous store that it has bound
    facts: Annotated[dict[Name, Text], Meta(max_length=64)]  # that must be the same on every machine
    round: Tally = 0  # the one that its ranks belong to, or belonged to last; 0: none
    members: Annotated[list[Member], Meta(max_length=1 << 12)] = []  # the machines of that round
    running: bool = False  # whether ranks run here
    exit_code: int = 0  # the ranks' own, once they have ended; 1 when the launcher killed them
    reason: Text = ""  # for an exit code that no rank gave
    leaving: bool = False  # it was told to stop
    wanted: Tally = 1  # learner.machines
    max_restarts: Tally = 0  # failed rounds after which the job fails
    state: Text = ""  # how the learner has ended, where its lead rank ran here: done, drained


class RendezvousOrder(msgspec.Struct, frozen=True):
    """The order to a launcher of learner ranks: run the ranks of `round`, or end those that run and wait."""

    round: Tally = 0  # 0: none that this machine belongs to
    members: list[Member] = []  # the machines of the round
    drain: bool = False  # a machine of the round was told to stop: the learner writes a checkpoint and leaves
    exit_code: int | None = None  # the launcher ends with this code
    reason: str = ""
    active: bool = False  # a round runs, of other machines when `round` is 0
    machines: int = 0  # that are here
    log_rank: int = -1  # whose log's end the next report brings if that rank runs on this machine; -1: none


class MachineStatus(msgspec.Struct, frozen=True):
    host: str
    address: str
    state: str  # waiting | running | leaving
    index: int  # its place in the round, -1 outside
    last_seen_s: float


class ServiceReport(msgspec.Struct, frozen=True):
    """The report of a role that serves a model beside the nodes, sent about once a second and at every change."""

    name: Name
    host: Text
    pid: Tally
    kind: Text  # scorer
    state: Text  # starting | serving | silent (its server does not answer) | draining
    url: Text = ""
    since_s: Finite = 0.0
    run: Text = ""  # run.name, where a config's address names the broker; another run's broker refuses the report
    leaving: bool = False  # the last report


class ServiceOrder(msgspec.Struct, frozen=True):
    stop: bool = False  # drain as on SIGTERM
    log: bool = False  # the next report brings the log's end


class ServiceStatus(ServiceReport, frozen=True):
    """The newest report, its ages up to now; the state is `gone` when none has come for LOST_AFTER_S."""

    last_seen_s: Finite = 0.0


class JoinTimes(msgspec.Struct, frozen=True):
    """How a node's process came into the job: seconds from its start to each stage; 0: not there yet."""

    started_s: Seconds = 0.0  # Unix time at which the process started
    registered: Seconds = 0.0  # the broker knows it
    engine: Seconds = 0.0  # the engine is up
    staged: Seconds = 0.0  # it has staged a whole version, every bucket verified
    active: Seconds = 0.0  # the engine uses that version, and has proven it
    leased: Seconds = 0.0  # the first task
    delivered: Seconds = 0.0  # the broker has accepted its first group

    @property
    def sentence(self) -> str:
        """'joined in 12.34 s: engine 11.40, weights 0.30, lease 0.01, first group 0.63'; '' before the first group.

        Each figure is in seconds since the stage before; `engine` counts from the start of the process.
        """
        if not self.delivered:
            return ""
        reached = [0.0, self.engine, self.active, self.leased, self.delivered]
        names = ("engine", "weights", "lease", "first group")
        took = [f"{name} {after - before:.2f}" for name, (before, after) in zip(names, pairwise(reached), strict=True)]
        return f"joined in {self.delivered:.2f} s: {', '.join(took)}"


class NodeReport(msgspec.Struct, frozen=True):
    """A node's report on itself, sent with each heartbeat."""

    node_id: Name
    pid: int
    host: Text
    state: Text  # starting | joining | environments | generating | waiting | flipping | excluded | draining
    policy_version: Version  # -1 before the first weights
    wait: WaitFor = NO_WAIT
    since_s: Finite = 0.0
    tokens_generated: Tally = 0
    tokens_wasted: Tally = 0  # the sum of `waste`
    tokens_per_s: Finite = 0.0
    episodes_running: Tally = 0
    generation_stall_s: Finite = 0.0  # total so far
    flips: Tally = 0
    canary_max_difference: Finite = 0.0
    waste: WasteByReason = {}  # by this process: cancelled, stalled, waiting
    groups: Annotated[list[GroupWork], Meta(max_length=64)] = []  # the oldest ones that it works on
    concurrency: Tally = 0  # episodes that it runs at once at most, as of now; 0: it does not say
    kv_cache_usage: Finite = 0.0  # share of the engine's KV cache in use; 0 where it is not measured
    preemptions: Tally = 0  # requests that the engine has put back for want of KV cache, so far
    prefix_hit_rate: Finite = 0.0  # share of prompt tokens found in the prefix cache, so far; 0 where not measured
    samples_failed: CountByReason = {}  # by this process, by stop reason
    joined: JoinTimes = JoinTimes()
    pool: Text = ""  # eval: it takes held-out problems only
    evaluation_tokens: Tally = 0  # sampled for held-out problems; `tokens_generated` is without them
    instance: Text = ""  # random, one per process: a restarted container has the host and the pid of its predecessor
    run_id: Text = ""  # RunInfo.run_id of its config's broker; '' where not known, or from an earlier release
    former_wait: Text = msgspec.field(default="", name="waiting_on")  # a sentence, from a release without `wait`

    @property
    def waiting_on(self) -> str:
        return sentence(self.wait) or self.former_wait


class HeartbeatReply(msgspec.Struct, frozen=True):
    """`lost`: tokens that are no longer this node's; `weights_address`: '' while no learner is attached or it ended."""

    lost: list[str] = []
    weights_address: str = ""
    learner_incarnation: int = 0
    drain: bool = False
    # These two and time_s are also in the answer to a learner's report, which is None when all have their defaults.
    stop: bool = False  # drain as on SIGTERM
    log_rank: int = -1  # the rank (0 for a node) whose log's end the next message brings; -1: none
    time_s: Finite = 0.0  # the broker's clock, Unix seconds; 0: it records no trace
    span_bytes: Tally = 0  # so many more bytes of spans may the node send


class NodeStatus(msgspec.Struct, frozen=True):
    report: NodeReport
    leases: int
    alive: bool
    last_seen_s: float
    waste: WasteByReason = {}  # by this node id since it joined: what it reported, and what the broker counted


class StoreStatus(msgspec.Struct, frozen=True):
    bytes: int  # on the disk
    sync_s: float = 0.0  # how long one sync takes, lately
    recovery_s: float = 0.0  # how long the broker took to build its state again at its start; 0 for a new store
    stuck: str = ""  # why nothing can be written at the moment; '' when it can


class BrokerStatus(msgspec.Struct, frozen=True):
    pid: int
    address: str
    run: RunInfo
    groups_pending: int
    groups_ready: int
    groups_leased: int
    groups_taken: int
    groups_committed: int
    groups_dead: int
    bytes_held: int
    lease_expiries: int
    stale_results: int
    tokens_generated_total: int
    tokens_wasted_total: int
    learner: LearnerReport | None
    learner_last_seen_s: float
    nodes: list[NodeStatus]
    oldest_lease_s: float = 0.0
    refused_messages: int = 0  # that did not decode, broke a limit, or that their sender may not send
    steps_taken: int = 0  # uncommitted steps that have all their groups
    groups_filtered: int = 0  # by all steps, committed ones included
    denied_requests: int = 0  # those of them that their sender's role may not send
    quarantined_messages: int = 0  # those of them that this broker kept in RUN/quarantine
    waste: WasteByReason = {}  # sum over all nodes that ever joined; the learner's own is in `learner`
    store: StoreStatus | None = None  # None: nothing outlives the broker
    full: bool = False  # `max_bytes` is reached, or `store_lags`: only what the learner's next take needs is leased
    machines: list[MachineStatus] = []  # where the learner has several; spare ones included
    machines_wait: str = ""  # why no round of them runs
    stopping: bool = False  # `slipstream stop`: nothing is leased, and the broker ends when the others have left
    transcripts_dropped: int = 0  # they came with failed groups, and were not written
    evaluation: EvaluationProgress | None = None  # None: no version is being evaluated
    evaluation_tokens_total: int = 0  # sampled for held-out problems by all nodes that are there
    window: Window | None = None  # None: from a broker of an earlier release
    left: list[NodeStatus] = []  # the newest nodes that have left in good order, oldest first
    weights: WeightChange | None = None  # in effect; None: no weights came with tasks
    weight_requests: list[WeightRequest] = []  # not in effect yet, oldest first
    bytes_in_memory: int = 0  # part of `bytes_held`
    store_lags: bool = False  # groups come faster than the store takes them, and fill the memory
    services: list[ServiceStatus] = []  # the scorers that report; none of them is a node

    @property
    def present(self) -> list[str]:
        """The learner, its machines, the nodes and the services that have neither left nor fallen silent."""
        gone = self.learner is None or self.learner.state in (*LEARNER_ENDED, "lost")
        machines = [machine.host for machine in self.machines if machine.last_seen_s <= LOST_AFTER_S]
        nodes = [node.report.node_id for node in self.nodes if node.alive]
        return ["learner"] * (not gone) + machines + nodes + [s.name for s in self.services if s.state != "gone"]

    @property
    def newest_join(self) -> str:
        """How the newest living node that has handed in a group came into the job; '' when there is none."""
        joined = [node.report for node in self.nodes if node.alive and node.report.joined.delivered]
        report = max(joined, key=lambda r: r.joined.started_s, default=None)
        return "" if report is None else f"{report.node_id} {report.joined.sentence}"


class LedgerEntry(msgspec.Struct, frozen=True, gc=False):  # part of no cycle, and there are many
    """One task in the delivery ledger; `nodes` lists every node that ever leased it, in order."""

    serial: int
    state: str
    attempts: int
    nodes: list[str]
    step: int | None
    version_min: int | None
    version_max: int | None
    reward_mean: float | None
    reason: str = ""  # last failure
    filtered: bool = False  # `step` took it, and trained nothing on it
    source: str = ""  # the task's; '' in a job of one source


class BrokerEvent(msgspec.Struct, frozen=True):
    """join, leave, lease_expired, task_dead, stale_result, learner_attached, ... in order of `index`."""

    index: int
    time_s: float  # Unix time
    kind: str
    detail: dict[str, str | int | float] = {}
