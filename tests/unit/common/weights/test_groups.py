"""Buckets one behind the other: what is under way while the caller looks at one. And the store where members meet."""

import datetime
import re
from collections.abc import Callable

import pytest
import torch

from common.weights.transports.groups import POSTED, RelayedStore, in_turn
from common.weights.wire.failures import Late
from tests.rigs.waiting import LIMIT_S

PAYLOAD = torch.arange(2 * POSTED + 5, dtype=torch.uint8)
BUCKETS = PAYLOAD.split(2)
assert len(BUCKETS) > POSTED + 1


class MemberGone(RuntimeError):
    pass


class Noted:
    """A group that notes what was posted and waited for, and fails at one bucket."""

    def __init__(self, fails_at: int = -1) -> None:
        self.events: list[tuple[str, int]] = []
        self.fails_at = fails_at

    def post(self, bucket: torch.Tensor, timeout_s: float) -> Callable[[], None]:
        number = int(bucket[0]) // 2
        self.events.append(("post", number))

        def wait() -> None:
            self.events.append(("wait", number))
            if number == self.fails_at:
                raise MemberGone

        return wait

    def close(self) -> None:
        self.events.append(("close", 0))


def test_the_next_bucket_is_under_way_while_one_is_looked_at_and_no_more() -> None:
    group = Noted()
    for number, bucket in enumerate(in_turn(group, PAYLOAD, 2, 1.0)):
        assert torch.equal(bucket, BUCKETS[number])
        assert group.events.count(("wait", number)) == 1, "it is looked at when it is there"
        posted = [n for what, n in group.events if what == "post"]
        assert posted == list(range(min(number + POSTED, len(BUCKETS))))
        group.events.append(("look", number))
    assert [n for what, n in group.events if what == "look"] == list(range(len(BUCKETS)))
    assert ("close", 0) not in group.events, "a group that served to the end stays open"


def test_the_first_failure_is_the_callers_and_nothing_is_posted_or_under_way_after_it() -> None:
    group, seen = Noted(fails_at=1), list[int]()
    with pytest.raises(MemberGone):
        seen.extend(int(bucket[0]) // 2 for bucket in in_turn(group, PAYLOAD, 2, 1.0))
    assert seen == [0]
    assert ("post", POSTED + 1) not in group.events
    # a bucket posted behind it would be written into memory that the next attempt verifies
    assert group.events[group.events.index(("wait", 1)) + 1 :] == [("close", 0), ("wait", 2)]


def test_a_caller_that_leaves_leaves_nothing_under_way_and_one_bucket_and_none_at_all_go_through() -> None:
    group = Noted()
    buckets = in_turn(group, PAYLOAD, 2, 1.0)
    next(buckets)
    buckets.close()  # type: ignore[attr-defined]
    assert group.events[-2:] == [("close", 0), ("wait", 1)]
    assert [len(list(in_turn(Noted(), PAYLOAD[:n], 2, 1.0))) for n in (1, 0)] == [1, 0]


# ---------------------------------------------------------------- where a group meets


def test_waiting_ends_at_the_earlier_deadline_and_says_how_much_is_missing() -> None:
    store = RelayedStore(LIMIT_S, lambda key, value: None)
    store.add_entries({"a": b"1"})
    with pytest.raises(Late) as late:
        store.wait(["a", "b", "c"], datetime.timedelta(seconds=0.05))
    assert re.findall(r"[\d.]+", str(late.value)) == ["0.05", "2"]
    store.set_timeout(datetime.timedelta(seconds=0.06))
    with pytest.raises(Late) as late:
        store.wait(["b"], datetime.timedelta(seconds=LIMIT_S))
    assert re.findall(r"[\d.]+", str(late.value)) == ["0.06", "1"]
