"""The store where the members of a group meet: who is woken when, how many entries it takes, and errors in one line."""

import datetime
import threading

import pytest

from common.weights.transports import groups
from common.weights.transports.groups import RelayedStore, bucket_timeout, silence_bound
from common.weights.wire.failures import Failure, GivenUp
from tests.rigs.waiting import LIMIT_S


def meeting(timeout_s: float = 1e6) -> tuple[RelayedStore, list[tuple[str, bytes]]]:
    told = list[tuple[str, bytes]]()
    return RelayedStore(timeout_s, lambda key, value: told.append((key, value))), told


@pytest.mark.parametrize("how", ["theirs", "mine", "closed"])
def test_whoever_waits_is_woken_by_the_entry_and_by_the_end(how: str) -> None:
    store, _ = meeting()
    results = list[object]()

    def wait() -> None:
        try:
            results.append(store.multi_get(["a", "b"]))
        except GivenUp:
            results.append("given up")

    store.add_entries({"a": b"1"})
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    if how == "closed":
        store.close()
    else:
        store.add_entries({"b": b"2"}) if how == "theirs" else store.set("b", "2")
    thread.join(LIMIT_S)
    assert results == (["given up"] if how == "closed" else [[b"1", b"2"]])
    assert store.get("a") == b"1", "what is there can still be had"


def test_only_entries_of_this_member_are_told_and_the_first_value_of_a_key_stays() -> None:
    store, told = meeting()
    store.add_entries({"a": b"1"})
    store.set("b", "2")
    store.set("a", b"3")
    assert told == [("b", b"2"), ("a", b"3")]
    assert (store.get("a"), store.get("b")) == (b"1", b"2")
    assert store.check(["a", "b"]) and not store.check(["a", "c"])


def test_no_more_entries_are_kept_than_a_group_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MOST_ENTRIES", 2)
    store, _ = meeting()
    store.add_entries({"a": b"", "b": b"", "c": b""})
    assert store.check(["a", "b"]) and not store.check(["c"])


def test_a_wait_ends_after_the_shorter_of_both_limits() -> None:
    store, _ = meeting(0.01)
    for timeout in (None, datetime.timedelta(seconds=1e6)):
        with pytest.raises(RuntimeError):
            store.wait(["a"], timeout)
    store.set_timeout(datetime.timedelta(seconds=1e6))
    assert store.timeout == datetime.timedelta(seconds=1e6)
    with pytest.raises(RuntimeError):
        store.wait(["a"], datetime.timedelta(seconds=0.01))


def test_limits_follow_from_the_time_of_a_whole_publish() -> None:
    assert [bucket_timeout(s) for s in (0.4, 2.0, 8.0)] == [0.5, 0.5, 2.0]
    assert [silence_bound(s) for s in (4.0, 12.0, 80.0)] == [1.0, 3.0, 3.0]


def test_an_error_of_several_lines_is_told_by_its_first_one() -> None:
    assert Failure.of(RuntimeError("  first\nsecond\nthird")).text == "first"
    assert Failure.of(ValueError("")).text == "ValueError"
