"""A version on its way into an engine: when it is asked for, what a flip leaves behind, the time that steps lose."""

import asyncio
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.weights.receive.contract import Flip
from common.weights.receive.receiver import StagingStatus
from common.weights.receive.weight_client import FIRST_POLL_S, LAST_POLL_S, next_poll_s, until_staged
from common.weights.wire.failures import Failure, FailureKind, ProofFailed, StagingFailed
from common.weights.wire.layout import FIRST_RATE
from rollout_fleet.engine.scheduler_stats import StepClock
from rollout_fleet.vllm_patches.engine_process import CANARY, _resalt, drop_cache, let_canaries_first, session_key
from rollout_fleet.weights import engine_weights
from rollout_fleet.weights.engine_weights import EngineWeights
from rollout_fleet.weights.weight_proof import Proof
from tests.rigs.waiting import LIMIT_S


def test_it_is_a_preemption_of_nobody_also_not_of_those_who_were_preempted_before() -> None:
    requests = [SimpleNamespace(num_preemptions=n) for n in (0, 1, 3)]
    scheduler = SimpleNamespace(running=[*requests])

    def reset(reset_running_requests: bool) -> None:  # as vLLM's EngineCore does
        while reset_running_requests and scheduler.running:
            scheduler.running.pop().num_preemptions += 1

    drop_cache(SimpleNamespace(scheduler=scheduler, _reset_caches=reset))
    assert not scheduler.running and [request.num_preemptions for request in requests] == [0, 0, 0]


@pytest.mark.parametrize(
    ("tokens", "label", "kept"),
    [
        (12, "0:5", False),  # its first prompt
        (13, "0:5", True),  # that was put back after its first token, or a later turn
        (13, "1:3", False),  # the learner has started again
        (13, "0:4", True),
    ],
)
def test_a_request_that_continues_its_session_keeps_its_salt(tokens: int, label: str, kept: bool) -> None:
    hashed = list[str]()
    request = SimpleNamespace(
        cache_salt="0:4", session_id=session_key(7, 12), num_tokens=tokens, block_hashes=["old"],
        update_block_hashes=lambda: hashed.append(request.cache_salt),
    )  # fmt: skip
    _resalt(request, label)
    assert (request.cache_salt, hashed, request.block_hashes) == (
        ("0:4", [], ["old"]) if kept else (label, [label], [])
    )


class Core:
    """Notes how many halves of flips there are while the engine flips."""

    def __init__(self, weights: EngineWeights, fails: bool, proof_s: float = 0.0) -> None:
        self.weights, self.fails, self.seen, self.version = weights, fails, list[int](), -1
        self.proof_s, self.questions, self.flipped = proof_s, 0, 0.0

    async def call_utility_async(self, method: str, incarnation: int, version: int, recompute: bool) -> float:
        self.seen.append(self.weights.half_flips)
        self.version = version
        self.flipped = time.perf_counter()
        if self.fails:
            raise RuntimeError("no")
        return 0.25

    async def pause_scheduler_async(self, mode: str, **_: Any) -> None:
        if mode == "keep":
            self.seen.append(self.weights.half_flips)

    async def resume_scheduler_async(self) -> None:
        self.seen.append(self.weights.half_flips)

    async def prove(self, method: str, kwargs: dict[str, Any]) -> list[bytes]:
        assert method == "slipstream_proof"
        self.questions += 1
        there = time.perf_counter() - self.flipped >= self.proof_s
        return [msgspec.msgpack.encode(Proof(0, self.version, "sum") if there else None)]


@pytest.mark.parametrize(("batches_in_flight", "calls"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("fails", [False, True])
async def test_they_are_odd_from_the_pause_to_the_resumption_and_even_after(
    batches_in_flight: bool, calls: int, fails: bool
) -> None:
    weights = EngineWeights(recompute=False)
    core = Core(weights, fails)
    scheduler = SimpleNamespace(async_scheduling=batches_in_flight)
    config = SimpleNamespace(scheduler_config=scheduler, max_concurrent_batches=1)
    llm = SimpleNamespace(engine_core=core, vllm_config=config, collective_rpc=core.prove)
    await weights.attach(llm, usable=True)
    for flips in (1, 2):
        core.seen.clear()
        if fails:
            with pytest.raises(RuntimeError):
                await weights.flip(0, flips, "sum")
        else:
            assert isinstance(await weights.flip(0, flips, "sum"), Flip)
        assert set(core.seen) == {2 * flips - 1} and len(core.seen) == (min(calls, 2) if fails else calls)
        assert weights.half_flips == 2 * flips


async def test_a_long_proof_is_asked_for_ever_more_rarely() -> None:
    weights = EngineWeights(recompute=False)
    core = Core(weights, fails=False, proof_s=0.4)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False), max_concurrent_batches=1)
    await weights.attach(SimpleNamespace(engine_core=core, vllm_config=config, collective_rpc=core.prove), usable=True)
    await weights.flip(0, 1, "sum")
    assert core.questions <= 8 + 0.4 / LAST_POLL_S


@pytest.mark.parametrize(
    ("took_s", "share", "pause_s"),
    [
        (0.008, 0.0, 0.004),  # a version of one bucket
        (0.1, 0.0, LAST_POLL_S),
        (0.1, 0.1, LAST_POLL_S),  # 0.9 s to come
        (0.05, 0.8, 0.00625),
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
        self.watched: list[str] = []

    async def read(self) -> StagingStatus:
        share = (time.perf_counter() - self.began) / self.seconds
        self.asked.append(share)
        return StagingStatus("receiving", share=share) if share < 1 else StagingStatus("staged", receive_s=self.seconds)

    async def watch(self, status: StagingStatus) -> None:
        self.watched.append(status.state)


def test_a_version_is_found_soon_after_it_is_there_with_few_questions() -> None:
    transfer = Arriving(0.2)
    assert asyncio.run(until_staged(transfer.read, transfer.watch)) == 0.2
    assert len(transfer.asked) <= 0.2 / LAST_POLL_S + 8, "one in 20 ms, and some at the end"
    assert transfer.watched == ["receiving"] * (len(transfer.asked) - 1) + ["staged"]
    transfer = Arriving(0.031)
    asyncio.run(until_staged(transfer.read, transfer.watch))
    assert all(share < 1 for share in transfer.asked[:-1]), "the first question after its arrival finds it"


def test_a_transfer_that_failed_says_why_and_one_that_is_no_more_that_it_was_given_up() -> None:
    async def failed() -> StagingStatus:
        return StagingStatus("failed", failure=Failure(FailureKind.DAMAGED, "bucket 3"))

    async def void() -> StagingStatus:
        return StagingStatus()

    for read, kind in ((failed, FailureKind.DAMAGED), (void, FailureKind.GIVEN_UP)):
        with pytest.raises(StagingFailed) as raised:
            asyncio.run(until_staged(read, Arriving(1.0).watch))
        assert raised.value.kind is kind


async def test_a_large_version_and_a_slow_engine_get_the_time_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_weights, "ENGINE_TIMEOUT_S", 0.0)

    async def call(method: str, kwargs: dict[str, Any]) -> list[bytes]:
        return [msgspec.msgpack.encode(StagingStatus("staged", total_bytes=int(FIRST_RATE)))]

    weights = EngineWeights(recompute=False)
    with pytest.raises(ProofFailed):
        await weights._answered(asyncio.sleep(LIMIT_S), "a flip of nothing")
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False), max_concurrent_batches=1)
    await weights.attach(SimpleNamespace(vllm_config=scheduler, collective_rpc=call), usable=True)
    await weights.stage(b"publish", Arriving(1.0).watch)
    await weights._answered(asyncio.sleep(0.01), "a flip of 400 MB, which may take seconds")


class Busy:
    """An engine that answers a request after 0.3 s; `hangs`: its workers do not answer."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    async def request(self) -> str:
        await asyncio.sleep(0.3)
        return "read"

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[bytes]:
        await asyncio.sleep(LIMIT_S if self.hangs else 0.0)
        return [b""]


@pytest.mark.parametrize(("hangs", "most_s"), [(False, LIMIT_S), (True, LIMIT_S), (False, 0.1)])
async def test_a_canary_that_waits_for_other_requests_is_read_while_the_workers_answer(
    hangs: bool, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_weights, "ENGINE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_weights, "CANARY_TIMEOUT_S", most_s)
    weights = EngineWeights(recompute=False)
    weights._llm = engine = Busy(hangs)
    if not hangs and most_s == LIMIT_S:
        assert await weights._admitted(engine.request()) == "read"
        assert weights._slowest_s < 0.05, "the wait makes no later bound longer"
        return
    with pytest.raises(ProofFailed) as raised:
        await weights._admitted(engine.request())
    assert raised.value.kind is FailureKind.ENGINE


class Waiting(deque[Any]):
    """As vLLM's FCFSRequestQueue."""

    add_request, prepend_request, remove_request = deque.append, deque.appendleft, deque.remove


def test_canaries_come_before_other_requests_also_before_preempted_ones() -> None:
    canary, queue = f"{CANARY}0:4-77", Waiting()
    requests = {name: SimpleNamespace(request_id=name) for name in ("1", "2", canary, "3")}
    scheduler = SimpleNamespace(waiting=queue, requests=requests)

    def order() -> list[str]:
        return [request.request_id for request in queue]

    for name in ("1", "2", canary):
        queue.add_request(requests[name])
    let_canaries_first(scheduler, canary)
    assert order() == [canary, "1", "2"]
    queue.prepend_request(requests["3"])  # it was preempted
    let_canaries_first(scheduler)
    assert order() == [canary, "3", "1", "2"]
    queue.remove_request(requests.pop(canary))
    let_canaries_first(scheduler)
    assert order() == ["3", "1", "2"] and not scheduler.slipstream_canaries


async def test_an_engine_that_breaks_while_a_version_arrives_fails_its_staging() -> None:
    async def call(method: str, kwargs: dict[str, Any]) -> list[bytes]:
        if method == "slipstream_staging":
            raise RuntimeError("a worker died")
        return [b""]

    weights = EngineWeights(recompute=False)
    scheduler = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=False), max_concurrent_batches=1)
    await weights.attach(SimpleNamespace(vllm_config=scheduler, collective_rpc=call), usable=True)
    with pytest.raises(StagingFailed) as raised:
        await weights.stage(b"publish", Arriving(1.0).watch)
    assert raised.value.kind is FailureKind.ENGINE


class Steps:
    """Steps of chosen duration, behind five ordinary ones."""

    def __init__(self) -> None:
        self.now, self.half_flips = 0.0, 0
        self.clock = StepClock(lambda: self.now, batch=1000, flips=lambda: self.half_flips)
        assert [self.step(0.01) for _ in range(5)] == [0.0] * 5

    def step(self, took_s: float, recomputed: int = 0, running: int = 8) -> float:
        self.now += took_s
        return self.clock.step(running, recomputed)


Part = tuple[tuple[float, ...], dict[str, int], Any]
PREEMPTED, LOST, NOTHING = {"recomputed": 400}, pytest.approx(0.04), pytest.approx(0.0, abs=1e-6)
LOSSES: dict[str, list[Part]] = {
    "at once": [((0.05, 0.01), PREEMPTED, LOST), ((0.02,), {}, 0.0)],
    "batches in flight": [((0.01, 0.05), PREEMPTED, LOST), ((0.02,), {}, 0.0)],
    "a larger batch is no loss and a pause is no step": [
        ((0.02,) * 200, {}, NOTHING), ((0.06,), PREEMPTED, pytest.approx(0.04, rel=0.01)),
        ((0.02, 5.0), {}, NOTHING), ((0.06,), PREEMPTED, pytest.approx(0.04, rel=0.1)),
    ],
    "more tokens than a step takes are computed again in the steps after": [
        ((0.05,) * 4, {"recomputed": 3500}, pytest.approx(0.16)), ((0.01,), {}, NOTHING), ((0.05,), {}, 0.0),
    ],
    "an idle engine loses nothing": [((0.01,), {"running": 0}, 0.0), ((60.0,), PREEMPTED, 0.0), ((0.01,), {}, NOTHING)],
}  # fmt: skip


@pytest.mark.parametrize("parts", LOSSES.values(), ids=LOSSES)
def test_what_steps_take_longer_for_preempted_requests_is_lost(parts: list[Part]) -> None:
    """A part: the times of its steps, what its first one reports, and what is lost in all of them."""
    steps = Steps()
    for (first, *later), told, lost in parts:
        assert steps.step(first, **told) + sum(map(steps.step, later)) == lost, (first, *later)


@pytest.mark.parametrize("marks", [(2, 2), (1, 2), (1, 1)])
def test_a_step_with_a_flip_in_it_is_no_loss(marks: tuple[int, int]) -> None:
    """`marks`: half flips when this step is heard of and when the next one is: a flip may lie in either or in both."""
    steps = Steps()
    steps.half_flips = marks[0]
    assert steps.step(5.0, recomputed=400) == 0.0
    steps.half_flips = marks[1]
    assert steps.step(0.01 if marks == (2, 2) else 5.0) == pytest.approx(0.0)
    steps.half_flips = 2
    steps.step(0.01)
    assert steps.step(0.05, recomputed=400) == pytest.approx(0.04), "it is not taken for the usual either"
