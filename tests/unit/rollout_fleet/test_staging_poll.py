"""When a node asks whether a version is staged."""

import asyncio
import time

import pytest

from common.weights.receiver import StagingStatus
from rollout_fleet.weights.engine_weights import FIRST_POLL_S, LAST_POLL_S, StagingFailed, next_poll_s, until_staged


@pytest.mark.parametrize(
    ("took_s", "share", "pause_s"),
    [
        (0.0, 0.0, LAST_POLL_S),
        (0.1, 0.1, LAST_POLL_S),  # 0.9 s to come
        (0.05, 0.8, 0.0125),
        (0.05, 1.0, FIRST_POLL_S),  # every bucket is there, the last one is being verified
    ],
)
def test_the_next_question_comes_when_the_rest_should_be_there(took_s: float, share: float, pause_s: float) -> None:
    assert next_poll_s(took_s, share) == pytest.approx(pause_s)


class Arriving:
    """A transfer of `seconds` that notes when it is asked for."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds = time.perf_counter(), seconds
        self.asked: list[float] = []

    async def read(self) -> StagingStatus:
        share = (time.perf_counter() - self.began) / self.seconds
        self.asked.append(share)
        return StagingStatus("receiving", share=share) if share < 1 else StagingStatus("staged", receive_s=self.seconds)


def test_a_version_is_found_soon_after_it_is_there_with_few_questions() -> None:
    transfer = Arriving(0.2)
    assert asyncio.run(until_staged(transfer.read)) == 0.2
    assert len(transfer.asked) <= 0.2 / LAST_POLL_S + 4, "one in 20 ms, and some at the end"
    transfer = Arriving(0.031)
    asyncio.run(until_staged(transfer.read))
    assert all(share < 1 for share in transfer.asked[:-1]), "the first question after its arrival finds it"


def test_a_transfer_that_failed_says_why_and_one_that_is_no_more_that_it_was_given_up() -> None:
    async def failed() -> StagingStatus:
        return StagingStatus("failed", error="bucket 3")

    async def void() -> StagingStatus:
        return StagingStatus()

    for read, says in ((failed, "bucket 3"), (void, "given up")):
        with pytest.raises(StagingFailed, match=says):
            asyncio.run(until_staged(read))
