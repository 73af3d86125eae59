"""A store that is not what it seems: its identity is gone, or a node counted nonsense into it."""

from pathlib import Path

import msgspec
import pytest

from broker.contract import BrokerStatus, LearnerReport, NodeReport
from common.errors import UsageError
from common.rollouts import GroupMeta
from tests.unit.broker.durable_rig import Rig
from tests.unit.broker.test_store import newest


def test_a_store_without_its_identity_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Taken for an empty one, it would be written over: its checksums cannot be checked without the identity."""
    home = tmp_path / "store"
    rig = Rig(home)
    rig.begin()
    rig.step(0)
    rig.settle()
    rig.close()
    (home / "store.json").unlink()
    before = newest(home).read_bytes()
    with pytest.raises(UsageError, match=r"store\.json.*missing"):
        Rig(home)
    assert newest(home).read_bytes() == before


@pytest.mark.parametrize("seconds", [-1.0, 1e300])
def test_seconds_that_a_node_made_up_leave_neither_store_nor_status_unreadable(tmp_path: Path, seconds: float) -> None:
    home = tmp_path / "store"
    rig = Rig(home)
    rig.begin()
    rig.offer(2)
    for lease in rig.lease():
        assert rig.state.complete("n0", lease.token, GroupMeta(0, 0, 0.5, 1 << 53, 0, seconds), b"g", 1)
    assert rig.state.take(0, 2) is not None
    rig.state.filter(0, [0, 1], 0)
    rig.settle()
    rig.close()
    again = Rig(home)
    encoded = msgspec.msgpack.encode(again.state.status())
    again.close()
    assert msgspec.msgpack.decode(encoded, type=BrokerStatus).groups_taken == 2


def test_a_report_cannot_make_the_sum_of_waste_unreadable(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "store")
    rig.state.attach(LearnerReport(1, 1, "training", 0))
    for number in range(2):
        rig.state.register(NodeReport(f"n{number}", 1, "h", "generating", 0, tokens_wasted=1 << 53))
    encoded = msgspec.msgpack.encode(rig.state.status())
    rig.close()
    assert msgspec.msgpack.decode(encoded, type=BrokerStatus).waste["cancelled"].tokens == 1 << 53
