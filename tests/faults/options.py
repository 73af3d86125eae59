"""The options of the processes of a fault test, and the file that their learner writes."""

from pathlib import Path
from typing import Any

import msgspec

from learner.checkpoint.folder import StreamState

GROUP_SIZE = 2
PROMPTS = 1009  # rows of the dataset
GROUPS_PER_STEP = 4
MAX_STALENESS = 1
LEASE_S = 1.0
HEARTBEAT_S = 0.2
RETRY_S = 0.5  # clients repeat a request after it; in the product 2 s


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The behaviour of one node."""

    address: str
    name: str
    seed: int = 0
    think_s: float = 0.05  # mean time of an episode
    concurrency: int = 6  # episodes at once
    heartbeat_s: float = HEARTBEAT_S
    padding_tokens: int = 0  # added to every sample, to make groups large
    hang_after: int | None = None  # from this episode on the node's loop stands still; its heartbeats continue
    repeats: bool = False  # hand in every group three times


class LearnerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str
    run_dir: str
    incarnation: int
    step_s: float = 0.03
    in_order: bool = False
    deadline_s: float = 30.0  # how long it waits for an answer of the broker
    every: int = 3  # steps between checkpoints
    store_may_change: bool = False  # else a broker that has forgotten something is an error


class Trained(msgspec.Struct, frozen=True):
    """A line of learner.jsonl: a step was trained, or trained again."""

    at_s: float  # monotonic seconds, the same clock for every process of the machine
    incarnation: int
    step: int
    groups: list[list[Any]]  # [serial, position in the dataset, marks of the samples...] of each, in order
    weights: str  # hash over the payloads of all steps up to this one


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the learner resumes from: next step, weights, the groups behind them, and the task stream."""

    step: int = 0
    weights: str = ""
    trained: list[list[list[Any]]] = []
    stream: StreamState = msgspec.field(default_factory=StreamState)
    first: int = 0  # the broker's store knows the steps from this one on; another store had those before

    @classmethod
    def load(cls, run_dir: Path) -> "Checkpoint":
        """The checkpoint of a run, an empty one when there is none yet."""
        path = run_dir / "checkpoint.json"
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()
