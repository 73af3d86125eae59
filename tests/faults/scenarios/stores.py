"""Another store behind the broker's address, while learner and nodes live: an empty one, or an older state of it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tests.faults.scenario import scenario
from tests.rigs.fault_run import FaultRig
from tests.rigs.promise import LEASE_S, Checkpoint, Trained, trained_lines
from tests.rigs.waiting import LIMIT_S

EMPTIED = {
    "recovered": "three new steps, from the start of the broker on",
    "bound": "`broker.lease_s` + start of a process + 3 s",
    "bound_s": LEASE_S + 4.0,
    "promise": "no group is trained twice, no prompt is skipped or drawn twice",
}
REDIS_EMPTIED = EMPTIED | {
    "bound": "6 s for the former leader + `broker.lease_s` + start of a process + 3 s",
    "bound_s": LEASE_S + 10.0,
}
PUT_BACK = EMPTIED | {
    "recovered": "three steps of the next learner, from its start on",
    "bound": "start of a process + replay + `broker.lease_s` + 2 s",
    "bound_s": LEASE_S + 4.0,
}


@scenario(fault="store: the broker's machine loses RUN/store; the learner goes on living", **EMPTIED)
def store_emptied(rig: FaultRig) -> float:
    """Every request of the learner says how far the log went. The broker does not know that log, so the learner
    attaches again, makes a checkpoint, and offers again what it has not consumed. No process ends.
    """
    return emptied_s(rig)


@scenario(fault="Redis: the server comes back empty; the learner goes on living", redis="always", **REDIS_EMPTIED)
def redis_emptied(rig: FaultRig) -> float:
    """The next broker gives its predecessor 6 s to write everything again. Then it begins an empty store
    (`store_lost`), and the learner follows as with files.
    """
    recovery_s = emptied_s(rig)
    assert rig.events("store_lost")
    return recovery_s


@scenario(
    fault="store: an older state of it comes back, as after a power cut with `broker.durability: everysec`; the "
    "learner goes on living",
    **PUT_BACK,
)
def store_put_back(rig: FaultRig) -> float:
    """The log ends before the place that the learner names, or continues differently from there. The learner ends with
    exit code 1. The next one resumes from the checkpoint and gets the groups that the store still knows.
    """
    return put_back_s(rig)


@scenario(
    fault="Redis: an older state of it comes back together with RUN/redis.json, so that no broker notices; the learner "
    "goes on living",
    redis="everysec",
    **PUT_BACK,
)
def redis_put_back(rig: FaultRig) -> float:
    """As with files."""
    return put_back_s(rig)


@scenario(
    fault="store: a copy that is older than the checkpoint comes back; later it is moved away",
    recovered="three new steps, from the start of the third learner on",
    bound="start of a process + `broker.lease_s` + 2 s",
    bound_s=LEASE_S + 4.0,
    promise=EMPTIED["promise"],
)
def store_older_than_the_checkpoint(rig: FaultRig) -> float:
    """The living learner ends with exit code 1. The next one refuses with exit code 2, because the checkpoint was
    trained on groups that this store would give out again. With the store moved away it offers the tasks that were
    not consumed.
    """
    lose_what_was_told(rig, every=3)
    resumed = Checkpoint.load(rig.run_dir).step
    keep_lines(rig, lambda line: line.step < resumed)
    refused = rig.start_learner()
    assert refused.wait(LIMIT_S) == 2, rig.log_of("learner")
    assert "RUN/store" in rig.log_of("learner")
    assert rig.broker_process is not None
    rig.kill(rig.broker_process)
    shutil.rmtree(rig.run_dir / "store")
    rig.start_broker()
    at_s = time.monotonic()
    rig.start_learner()
    return rig.new_steps_s(at_s)


# -------------------------------------------------------------------- how it is done


def emptied_s(rig: FaultRig) -> float:
    rig.learner_options = {"store_may_change": True}
    rig.start_all(nodes=2)
    learner = rig.learner_process
    kill_keepers(rig)
    if rig.with_redis:
        for path in rig.redis.server.folder.glob("appendonly*"):
            removed(path)
    else:
        removed(rig.run_dir / "store")
    at_s = start_keepers(rig)
    recovery_s = rig.new_steps_s(at_s)
    assert learner is not None
    assert learner.poll() is None, "it never ended"
    assert len(list(rig.run_dir.glob("ledger-*.json"))) == 1, "the record of the first store is kept"
    return recovery_s


def put_back_s(rig: FaultRig) -> float:
    copied_s = lose_what_was_told(rig, every=1000)
    keep_lines(rig, lambda line: line.at_s <= copied_s)  # these steps have to get the same groups again
    at_s = time.monotonic()
    rig.start_learner()
    return rig.new_steps_s(at_s)


def keep_lines(rig: FaultRig, wanted: Callable[[Trained], bool]) -> None:
    """Drop the lines of learner.jsonl about steps whose moves are lost."""
    lines = [msgspec.json.encode(line) + b"\n" for line in trained_lines(rig.run_dir) if wanted(line)]
    (rig.run_dir / "learner.jsonl").write_bytes(b"".join(lines))


def lose_what_was_told(rig: FaultRig, every: int) -> float:
    """The run's store is as it was before some steps, under a learner that notices it and ends; returns as of when."""
    rig.learner_options = {"store_may_change": True, "every": every}
    rig.start_all(nodes=2)
    learner = rig.learner_process
    assert learner is not None
    copied_s = kill_keepers(rig)
    copies = [shutil.copytree(p, f"{p}.copy") if p.is_dir() else shutil.copy(p, f"{p}.copy") for p in kept(rig)]
    start_keepers(rig)
    rig.new_steps_s(time.monotonic(), steps=7)
    kill_keepers(rig)
    for path, copy in zip(kept(rig), copies, strict=True):
        removed(path)
        Path(copy).rename(path)
    start_keepers(rig)
    assert learner.wait(LIMIT_S) == 1, rig.log_of("learner")
    assert "broker.durability" in rig.log_of("learner")
    return copied_s


def kept(rig: FaultRig) -> list[Path]:
    """Everything that the store consists of."""
    return [rig.redis.server.folder, rig.run_dir / "redis.json"] if rig.with_redis else [rig.run_dir / "store"]


def removed(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def kill_keepers(rig: FaultRig) -> float:
    assert rig.broker_process is not None
    at_s = rig.kill(rig.broker_process)
    if rig.with_redis:
        rig.redis.server.kill()
    return at_s


def start_keepers(rig: FaultRig) -> float:
    """Redis and the broker; returns when, monotonic seconds."""
    if rig.with_redis:
        rig.redis.server.start()
    at_s = time.monotonic()
    rig.start_broker()
    return at_s
