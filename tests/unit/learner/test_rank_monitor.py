"""The monitor of ranks, without processes; tests/integration/learner/test_deadlines.py stops real ones."""

import pytest
import torch.distributed as dist

from learner import rank_monitor
from learner.rank_monitor import RankMonitor
from tests.rigs.waiting import until


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    made = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(made.port))
    return made


def test_the_reason_of_a_rank_that_fails_before_its_first_sign_is_heard(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    codes: list[int] = []
    monkeypatch.setattr(rank_monitor, "leave", codes.append)
    with RankMonitor(0, 2, timeout_s=30.0, on_silence=lambda who: None, on_end=ends.append):
        dist.PrefixStore("rank-monitor", store).set("end", "2 model.path: no such folder")
        until(lambda: codes)
    assert (codes, ends) == ([2], ["model.path: no such folder"])


def test_an_error_that_may_be_a_collectives_deadline_says_what_that_is_also_to_the_other_ranks(
    store: dist.Store,
) -> None:
    with (
        pytest.raises(RuntimeError) as raised,
        RankMonitor(0, 2, timeout_s=30.0, on_silence=lambda who: None, on_end=lambda reason: None),
    ):
        raise RuntimeError("no answer")
    [note] = raised.value.__notes__
    told = dist.PrefixStore("rank-monitor", store).get("end").decode()
    assert "learner.timeout_s" in note and told == f"1 RuntimeError: no answer. {note}"
