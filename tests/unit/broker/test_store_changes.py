"""A learner that was told something beside a broker whose store has forgotten it, or is another one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.client.connection import BrokerClient
from broker.contract import LearnerReport, LogPosition
from broker.delivery.learner_rules import LearnerRules
from common.errors import StoreChanged
from tests.rigs.brokers import DurableRig, job, tasks
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S
from tests.unit.broker.conftest import Running

REPORT = LearnerReport(1, 1, "training", 0, instance="me")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "store"


def told(rig: DurableRig) -> LogPosition:
    """The position that a learner has when its answer is acknowledged."""
    position = rig.state.position
    rig.settle()
    return position


def test_what_was_told_is_known_to_every_later_broker_on_the_same_store(home: Path) -> None:
    positions: list[LogPosition | None] = [None]
    for start in range(3):
        with DurableRig(home).begin() as rig:
            rig.step(start)
            positions.append(told(rig))
            for position in positions:
                LearnerRules(rig.state).check_position(position)


@pytest.mark.parametrize("more", [0, 40], ids=["fewer records", "more records than before"])
def test_an_older_copy_of_the_store_does_not_pass_for_it_however_much_is_recorded_since(home: Path, more: int) -> None:
    with DurableRig(home).begin() as rig:
        early = told(rig)
        shutil.copytree(home, copy := home.with_name("copy"))
        rig.step(0)
        late = told(rig)
    with DurableRig(copy) as rig:
        for _ in range(more):
            rig.ready()
        rig.settle()
        LearnerRules(rig.state).check_position(early)
        assert (rig.state.position.seq > late.seq) == bool(more)
        with refused(StoreChanged, rig.state.store_id, f"up to {late.seq} "):
            LearnerRules(rig.state).check_position(late)


def test_a_position_of_another_store_is_unknown_and_so_is_one_from_very_many_starts_ago(home: Path) -> None:
    with DurableRig(home).begin() as rig:
        position = told(rig)
        for _ in range(100):
            rig.state.open(rig.journal.seq)
        with pytest.raises(StoreChanged):
            LearnerRules(rig.state).check_position(position)
        assert len(rig.state.openings) < 100
    with DurableRig(home.with_name("other")).begin() as rig, pytest.raises(StoreChanged):
        LearnerRules(rig.state).check_position(position)


def use_offer(learner: BrokerClient) -> object:
    return learner.offer(tasks(1, 2))


def use_take(learner: BrokerClient) -> object:
    return learner.take(0, 2, LIMIT_S)


def use_commit(learner: BrokerClient) -> object:
    return learner.commit(0)


def use_evaluate(learner: BrokerClient) -> object:
    return learner.evaluate(None, [], [])


@pytest.mark.parametrize("request_", [use_offer, use_take, use_commit, use_evaluate])
@pytest.mark.parametrize("durability", ["fsync", "memory"])
def test_every_request_of_an_attached_learner_finds_out_until_it_attaches_again(
    tmp_path: Path, running: Running, request_: Callable[[BrokerClient], object], durability: str
) -> None:
    config = job(tmp_path, durability=durability)
    with running(config) as broker:
        address, learner = broker.address, broker.client()
        before = learner.attach(REPORT)
        assert learner.offer(tasks(2)) == 2
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
    with running(job(tmp_path, durability=durability, address=address)), learner:
        with refused(StoreChanged):
            request_(learner)
        after = learner.attach(REPORT)
        assert after.store_id != before.store_id
        assert learner.offer(tasks(2)) == 2
