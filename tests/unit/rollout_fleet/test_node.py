"""The node loop over the in-memory broker and a scripted sampler."""

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from common.errors import EXIT_DONE, EXIT_FAILED, BrokerError, BrokerUnreachable, SlipstreamError
from common.rollouts import Sample, decode_group
from common.spans import Span, SpanBatch
from common.waits import WaitFor, WaitKind
from common.waste import Waste
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.episode.concurrency import LOOKS, AdaptiveLimit
from rollout_fleet.episode.driver import EpisodeDriver
from rollout_fleet.main import _drain_on_signals, _register
from rollout_fleet.node import node
from rollout_fleet.node.heartbeat import BrokerLost, BrokerTimeout, Heartbeat
from rollout_fleet.node.node import Node
from rollout_fleet.node.node_status import NodeStatusTracker
from rollout_fleet.node.running_groups import NodeParts
from tests.rigs.brokers import MemoryBroker, run_info
from tests.rigs.refusals import refused
from tests.rigs.telemetry import recorded
from tests.rigs.waiting import LIMIT_S, until_async
from tests.unit.rollout_fleet.fleet_fakes import (
    InOwnerLoop,
    ScriptedFeed,
    ScriptedSampler,
    add,
    addition_task,
    learner_report,
    make_driver,
)


async def _unchanged(samples: list[Sample], problem: dict[str, Any]) -> list[Sample]:
    return samples


class Site:
    """One node against one in-memory broker, with a real heartbeat thread; `play` replaces the driver of episodes."""

    def __init__(
        self,
        concurrency: int = 4,
        drain_s: float = 2.0,
        wrap: Callable[[Any], Any] = lambda broker: broker,
        respond: Callable[[str], Any] = add,
        patience_s: float = 30.0,
        name: str = "n0",
        broker: MemoryBroker | None = None,
        play: Callable[..., Any] | None = None,
        adapt: AdaptiveLimit | None = None,
        gated: bool = False,
        log: Path = Path(),
    ) -> None:
        self.info = run_info(groups_per_step=4)
        self.broker = broker or MemoryBroker(self.info)
        self.learner = self.broker.learner()
        self.sampler = ScriptedSampler(respond)
        if gated:
            self.sampler.gate.clear()
        self.feed = ScriptedFeed()
        self.status = NodeStatusTracker(name)
        self.link = InOwnerLoop(self.broker.node())
        timeout = BrokerTimeout(patience_s, "memory")
        self.beat = Heartbeat(lambda: self.link, self.status, timeout, 0.05, log)  # type: ignore[arg-type,return-value]
        self.driver = make_driver(self.sampler, Addition)
        self.parts = NodeParts(
            broker=wrap(self.broker.node()),
            feed=self.feed,
            drivers={"": SimpleNamespace(run=play, paused="", compared=_unchanged) if play else self.driver},  # type: ignore[dict-item]
            concurrency=concurrency,
            status=self.status,
            timeout=timeout,
            counters=self.sampler.counters,
            beat_now=self.beat.beat_now,
        )
        self.node = Node(self.parts, lambda: adapt, drain_s)

    async def __aenter__(self) -> "Site":
        await self.broker.node().register(self.status.report())
        self.beat.start(self.node.on_heartbeat, self.node.fail)
        self.running = asyncio.create_task(self.node.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.beat.stop()

    def attach(self, tasks: int, version: int | None = 0, group_size: int = 2) -> None:
        self.learner.attach(learner_report())
        self.learner.offer([addition_task(i, group_size) for i in range(tasks)])
        if version is not None:
            self.feed.set(version=version, incarnation=0)

    def states(self) -> list[str]:
        return [entry.state for entry in self.learner.ledger()]


async def test_it_leases_what_the_window_allows_hands_in_every_group_and_reports_its_first() -> None:
    async with Site() as site:
        site.attach(tasks=20)
        await until_async(lambda: site.states()[:8] == ["ready"] * 8)
        await until_async(lambda: site.status.report().state == "waiting")
        assert site.status.report().wait == WaitFor(WaitKind.WINDOW, version=0)
        assert site.states()[8:] == ["pending"] * 12
        groups = site.learner.take(0, 4, 0.0)
        assert groups is not None
        assert [g.serial for g in groups] == [0, 1, 2, 3]
        decoded = decode_group(groups[3].payload)
        assert [s.reward for s in decoded.samples] == [1.0, 1.0]
        assert groups[3].meta.reward_mean == 1.0
        joined = site.status.report().joined
        assert 0 < joined.leased <= joined.delivered
        await until_async(lambda: site.learner.status().nodes[0].report.joined == joined)


class Around:
    """A node's broker client with some calls of its own; the rest pass through."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker

    def __getattr__(self, name: str) -> Any:
        return getattr(self.broker, name)


async def test_a_new_version_opens_the_window_at_once_and_the_node_asks_for_what_it_has_room_for() -> None:
    asked: list[tuple[int, int]] = []  # groups, episodes that ran

    class Recording(Around):
        async def lease(self, node_id: str, version: int, max_groups: int, wait_s: float) -> Any:
            asked.append((max_groups, site.node.groups.episodes_running))
            return await self.broker.lease(node_id, version, max_groups, wait_s)

    async with Site(concurrency=4, wrap=Recording) as site:
        site.attach(tasks=20, group_size=4)
        await until_async(lambda: site.states()[:8] == ["ready"] * 8)
        asked.clear()
        site.feed.set(version=1)
        await until_async(lambda: site.states()[:12] == ["ready"] * 12)
        assert asked[0] == (3, 0)  # one that it runs and two ahead
        assert max(groups for groups, _ in asked) == 3
        assert site.states()[12] == "pending"


async def test_without_weights_of_this_incarnation_it_leases_nothing_and_says_so() -> None:
    async with Site() as site:
        await until_async(lambda: site.status.report().wait.kind == WaitKind.LEARNER)
        site.attach(tasks=4, version=None)
        await until_async(lambda: site.status.report().wait.kind == WaitKind.WEIGHTS)
        assert site.status.report().state == "joining"
        assert site.feed.followed[-1] == ("tcp://127.0.0.1:1", 0)
        site.learner.attach(learner_report(incarnation=3))
        site.feed.set(version=5, incarnation=2)
        await until_async(lambda: site.status.report().wait == WaitFor(WaitKind.OTHER_WEIGHTS, count=3))
        assert site.states() == ["pending"] * 4
        site.feed.set(version=0, incarnation=3)
        await until_async(lambda: site.states() == ["ready"] * 4)


async def test_a_group_is_handed_in_as_its_comparison_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def halved(driver: EpisodeDriver, samples: list[Sample], problem: dict[str, Any]) -> list[Sample]:
        return [msgspec.structs.replace(sample, reward=sample.reward / 2) for sample in samples]

    monkeypatch.setattr(EpisodeDriver, "compared", halved)
    async with Site() as site:
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["ready"])
        (group,) = site.learner.take(0, 1, 0.0) or []
        assert group.meta.reward_mean == 0.5
        assert [sample.reward for sample in decode_group(group.payload).samples] == [0.5, 0.5]


async def test_a_paused_driver_gets_no_tasks_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = ["judge: HTTP 503"]
    monkeypatch.setattr(EpisodeDriver, "paused", property(lambda _: reason[0]))
    monkeypatch.setattr(node, "MEASURE_S", 0.01)
    async with Site() as site:
        site.attach(tasks=8)
        await until_async(lambda: site.status.report().wait.kind == WaitKind.SCORER)
        assert site.status.report().wait.cause == "judge: HTTP 503"
        assert site.states() == ["pending"] * 8
        reason[0] = ""
        await until_async(lambda: site.states() == ["ready"] * 8)


async def test_a_pause_that_ends_before_it_is_measured_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    def paused(_: NodeParts) -> str:
        return waits.pop() if waits and sys._getframe(1).f_code.co_name == "_turn" else ""

    monkeypatch.setattr(NodeParts, "paused", property(paused))
    monkeypatch.setattr(node, "MEASURE_S", 0.01)
    async with Site() as site:
        site.attach(tasks=2)
        await until_async(lambda: site.states() == ["ready"] * 2)
        waits.append("judge: HTTP 503")
        site.node._wake()
        await until_async(lambda: not waits)
        site.learner.offer([addition_task(2, 2)])
        await until_async(lambda: site.states() == ["ready"] * 3)


async def test_it_leases_ahead_but_no_further_than_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "REPORTED", 3)
    async with Site(concurrency=4, gated=True) as site:
        site.attach(tasks=8)
        await until_async(lambda: site.states().count("leased") == 4)
        await asyncio.sleep(0.1)
        assert site.states().count("leased") == 4  # two groups of two run, two wait
        assert len(site.sampler.calls) == 4
        await until_async(lambda: site.status.report().state == "generating")
        assert [group.serial for group in site.status.report().groups] == [0, 1, 2], "the oldest are reported"
        site.sampler.gate.set()
        await until_async(lambda: site.states() == ["ready"] * 8)
        assert site.sampler.most_at_once == 4


async def test_one_long_episode_of_a_group_keeps_no_slot_empty_and_the_start_of_environments_is_told() -> None:
    answer, first = asyncio.Event(), asyncio.Event()

    async def one_long(problem: dict[str, Any], seed: int, progress: Any, *more: Any) -> Any:
        progress.at("environment")
        await answer.wait()
        if seed % 100 == 0:  # the first sample of every group does not end
            progress.at("engine")
            await first.wait()
        return await site.driver.run(problem, seed, progress, *more)

    async with Site(concurrency=4, play=one_long) as site:
        site.attach(tasks=8)
        await until_async(lambda: site.status.report().wait == WaitFor(WaitKind.ENVIRONMENTS, count=4))
        assert site.status.report().state == "environments"
        answer.set()
        await until_async(lambda: site.status.report().state == "generating")
        await until_async(lambda: site.node.groups.episodes_running == 4 and len(site.status.leases) >= 4)
        # four groups with one long episode each use the four slots; counted by groups, two would have filled it
        await until_async(lambda: [g.finished for g in site.status.report().groups][:4] == [1, 1, 1, 0])
        work = site.status.report().groups[0]
        assert (work.serial, work.samples, work.state) == (0, 2, "engine")
        first.set()
        await until_async(lambda: site.states() == ["ready"] * 8)


async def test_the_limit_follows_what_the_kv_cache_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ADAPT_S", 0.05)

    class Counted(AdaptiveLimit):
        looks = 0

        def look(self, *arguments: Any) -> int:
            self.looks += 1
            return super().look(*arguments)

    adapt = Counted(2, 8, 2)
    async with Site(concurrency=4, adapt=adapt, gated=True) as site:
        site.attach(tasks=8)
        await until_async(lambda: site.sampler.now == 8)
        site.sampler.counters.running, site.sampler.counters.waiting = 6, 2
        for _ in range(LOOKS + 2):
            site.sampler.counters.recompute_s += 0.5
            before = adapt.looks
            await until_async(lambda: adapt.looks > before)  # noqa: B023
        assert site.status.report().concurrency == 6
        assert site.sampler.now == 8  # no episode is stopped
        site.sampler.gate.set()
        await until_async(lambda: site.states() == ["ready"] * 8)


async def test_a_node_whose_id_was_taken_by_another_process_stops() -> None:
    async with Site() as site:
        await site.broker.node().register(msgspec.structs.replace(site.status.report(), pid=-1))
        with refused(BrokerError, "'n0'", "process -1"):
            await asyncio.wait_for(site.running, LIMIT_S)


async def test_a_node_ends_with_the_reason_when_another_runs_broker_takes_the_place_of_its_own() -> None:
    other = MemoryBroker(run_info(groups_per_step=4, name="other", run_id="b"))
    own = MemoryBroker(run_info(groups_per_step=4, run_id="a"))
    async with Site(broker=own) as site:
        await _register(site.parts.broker, site.status, "memory")
        assert site.status.report().run_id == "a"
        other.learner().offer([addition_task(0)])
        site.parts.broker.use(other.state)  # type: ignore[attr-defined]
        site.link._broker.use(other.state)  # type: ignore[attr-defined]
        with refused(BrokerError, "'other'", "id b", "id a"):
            await asyncio.wait_for(site.running, LIMIT_S)
    assert (other.state.fleet.nodes, [entry.state for entry in other.learner().ledger()]) == ({}, ["pending"])


async def test_heartbeats_come_from_a_thread_of_their_own_and_keep_leases() -> None:
    now = [0.0]
    async with Site(broker=MemoryBroker(run_info(groups_per_step=4), lambda: now[0]), gated=True) as site:
        site.attach(tasks=1)
        await until_async(lambda: len(site.status.leases) == 1)
        for _ in range(3):
            now[0] += 20.0
            enough = site.link.beats + 2  # one may have begun before
            await until_async(lambda enough=enough: site.link.beats >= enough, "heartbeats")
        assert site.states() == ["leased"]
        assert site.learner.status().lease_expiries == 0
        assert site.link.threads == {"heartbeat"}
        site.sampler.gate.set()
        await until_async(lambda: site.states() == ["ready"])


async def test_a_lost_lease_cancels_its_episodes_and_counts_the_waste() -> None:
    async def one_of_two(problem: dict[str, Any], seed: int, progress: Any, group_seed: int) -> None:
        progress.sampled_tokens += 5
        await asyncio.sleep(60)

    async with Site(play=one_of_two) as site:
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["leased"])
        await until_async(lambda: len(site.status.leases) == 1)
        token = site.status.leases[0]
        await site.broker.node().release("n0", [token])
        await until_async(lambda: site.status.report().tokens_wasted == 10)
        assert site.status.report().waste["cancelled"] == Waste(10, 0.0)  # the broker has counted the seconds
        await until_async(lambda: site.status.leases != [token])
        assert site.learner.status().stale_results == 0


async def test_a_result_under_an_old_token_is_refused_and_the_task_done_once() -> None:
    delivered: list[float] = []  # when the node first delivered a group, as it says at each of its results

    class Slow(Around):
        """Completes only after the broker gave the lease to someone else."""

        async def complete(self, node_id: str, token: str, meta: Any, payload: bytes) -> bool:
            delivered.append(site.status.report().joined.delivered)
            if len(delivered) == 1:
                await self.broker.release(node_id, [token])
            return await self.broker.complete(node_id, token, meta, payload)

    async with Site(wrap=Slow) as site:
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["ready"])
        assert site.learner.status().stale_results == 1
        assert delivered == [0, 0], "a refused group is no first group"
        await until_async(lambda: site.status.report().joined.delivered > 0)


async def test_a_group_whose_samples_all_fail_counts_as_an_attempt_with_the_reason() -> None:
    async with Site(respond=lambda _: ValueError("token outside the vocabulary")) as site:
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["dead"])
        entry = site.learner.ledger()[0]
        assert entry.attempts == 3
        assert "vocabulary" in entry.reason
        assert site.learner.status().waste["failed"].seconds > 0


async def test_a_drain_finishes_what_runs_and_returns_what_has_not_started() -> None:
    async with Site(concurrency=4, gated=True) as site:
        site.attach(tasks=8)
        await until_async(lambda: site.states().count("leased") == 4 and len(site.sampler.calls) == 4)
        site.node.request_drain("SIGTERM")
        await until_async(lambda: site.states().count("pending") == 6)
        assert site.status.report().state == "draining"
        site.sampler.gate.set()
        assert await site.running == EXIT_DONE
        assert site.states() == ["ready"] * 2 + ["pending"] * 6
        assert [e.attempts for e in site.learner.ledger()][2:] == [0] * 6


async def test_a_closed_terminal_drains_a_node_and_asks_for_no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # also where pytest has nohup's
    asked = list[tuple[str, bool]]()
    node: Any = SimpleNamespace(request_drain=lambda reason, abandon: asked.append((reason, abandon)))
    async with AsyncExitStack() as stack:
        _drain_on_signals(stack, node)
        for count, number in enumerate((signal.SIGHUP, signal.SIGHUP, signal.SIGTERM)):
            os.kill(os.getpid(), number)
            await until_async(partial(lambda count: len(asked) > count, count))
    assert asked == [("SIGHUP", False), ("SIGHUP", False), ("SIGTERM", True)]


async def test_a_job_that_is_stopped_lets_the_node_finish_what_runs_and_sends_its_log_when_asked(tmp_path) -> None:
    (tmp_path / "log").write_text("the end\n")
    async with Site(concurrency=4, gated=True, log=tmp_path / "log") as site:
        site.attach(tasks=8)
        await until_async(lambda: len(site.sampler.calls) == 4)
        await until_async(lambda: site.learner.log("n0") == "the end")
        site.learner.stop()
        await until_async(lambda: site.states().count("pending") == 6)
        site.sampler.gate.set()
        assert await site.running == EXIT_DONE
        assert site.states() == ["ready"] * 2 + ["pending"] * 6


async def test_a_node_that_cannot_measure_its_status_ends_with_the_reason() -> None:
    class Broken(AdaptiveLimit):
        def look(self, *arguments: Any) -> int:
            raise OSError("no such counter")

    async with Site(adapt=Broken(2, 8, 2)) as site:
        with refused(SlipstreamError, "no such counter"):
            await asyncio.wait_for(site.running, LIMIT_S)


async def test_a_drain_while_the_engine_starts_needs_no_engine() -> None:
    def limit() -> AdaptiveLimit:
        raise AssertionError("the engine is not up, so the node cannot know how much its KV cache takes")

    site = Site()
    node = Node(site.parts, limit)
    node.request_drain("SIGTERM")
    assert await node.run() == EXIT_DONE


@pytest.mark.parametrize(("drain_s", "asks"), [(0.2, "a signal"), (2 * LIMIT_S, "a finished learner")])
async def test_a_drain_is_bounded_or_does_not_wait_at_all_and_gives_running_groups_back(
    drain_s: float, asks: str
) -> None:
    async with Site(drain_s=drain_s, gated=True) as site:
        site.attach(tasks=1)
        await until_async(lambda: len(site.sampler.calls) == 2)
        await until_async(lambda: site.parts.status.signs.answer("/readyz")[0] == 200)
        if asks == "a signal":
            site.node.request_drain("SIGTERM")
        else:
            site.learner.report(learner_report(state="done"))
        assert await asyncio.wait_for(site.running, LIMIT_S) == EXIT_DONE
        assert (site.states(), site.sampler.cancelled) == (["pending"], 2)


@pytest.mark.parametrize("refuses", [False, True], ids=["engine waits", "engine refuses because it is excluded"])
async def test_an_excluded_node_gives_everything_back_says_why_and_fails(refuses: bool) -> None:
    async with Site(gated=not refuses, respond=lambda _: SlipstreamError("excluded: bad sum")) as site:
        site.attach(tasks=4)
        await until_async(lambda: len(site.sampler.calls) >= (1 if refuses else 4))
        site.feed.set(excluded="canary differs by 3.2")
        assert await asyncio.wait_for(site.running, LIMIT_S) == EXIT_FAILED
        told = site.learner.status().nodes[0].report
        assert (told.state, told.wait.cause) == ("excluded", "canary differs by 3.2")
        if refuses:  # then its groups ended, and leaving returns their leases
            await site.broker.node().leave("n0")
        assert site.states() == ["pending"] * 4


async def test_a_dead_engine_ends_the_node_with_its_reason_and_returns_the_leases() -> None:
    async with Site(respond=lambda _: SlipstreamError("the engine died")) as site:
        site.attach(tasks=3)
        with refused(SlipstreamError, "engine died"):
            await asyncio.wait_for(site.running, LIMIT_S)
        await site.broker.node().leave("n0")
        assert site.states() == ["pending"] * 3


async def test_a_fault_of_the_program_ends_the_node_and_returns_the_leases() -> None:
    """Otherwise its heartbeats would renew the lease of a group that no task plays."""
    async with Site(respond=lambda _: AttributeError("no such thing")) as site:
        site.attach(tasks=3)
        with refused(SlipstreamError, "AttributeError", "no such thing"):
            await asyncio.wait_for(site.running, LIMIT_S)
        await site.broker.node().leave("n0")
        assert site.states() == ["pending"] * 3


class Flaky(Around):
    """Every kind of call fails its first `failures` times."""

    def __init__(self, broker: Any, failures: int) -> None:
        super().__init__(broker)
        self.left: dict[str, int] = defaultdict(lambda: failures)

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.left[name] -= 1
            if self.left[name] >= 0:
                raise BrokerUnreachable("no answer")
            return await getattr(self.broker, name)(*arguments)

        return call


async def test_a_broker_that_is_away_for_a_moment_loses_nothing() -> None:
    async with Site(wrap=partial(Flaky, failures=1)) as site:
        site.attach(tasks=3)
        await until_async(lambda: site.states() == ["ready"] * 3)
        assert [e.attempts for e in site.learner.ledger()] == [1, 1, 1]


async def test_a_broker_that_stays_away_ends_the_node_with_the_reason() -> None:
    site = Site(wrap=partial(Flaky, failures=10**9), patience_s=0.3)
    site.beat.start = lambda *_: None  # type: ignore[method-assign]
    site.beat.stop = lambda: asyncio.sleep(0)  # type: ignore[method-assign,assignment,return-value]
    async with site:
        site.attach(tasks=1)
        with refused(BrokerLost):
            await asyncio.wait_for(site.running, LIMIT_S)


async def test_two_nodes_share_the_window() -> None:
    first = Site(concurrency=64)
    second = Site(concurrency=64, name="n1", broker=first.broker)
    async with first, second:
        for site in (first, second):
            site.sampler.gate.clear()
            site.feed.set(version=0, incarnation=0)
        first.attach(tasks=8)
        await until_async(lambda: first.states() == ["leased"] * 8)
        assert {e.nodes[-1] for e in first.learner.ledger()} == {"n0", "n1"}


@pytest.mark.slow
async def test_its_heartbeats_bring_the_spans_of_leases_episodes_turns_and_states_to_the_broker() -> None:
    broker, batches = MemoryBroker(run_info(groups_per_step=4, trace=True)), list[SpanBatch]()
    broker.state.trace = batches.append

    def of(kind: str) -> list[Span]:
        return [span for batch in batches for span in batch.spans if span.kind == kind]

    with recorded():
        async with Site(broker=broker) as site:
            site.attach(tasks=3)
            await until_async(lambda: len(of("lease")) == 3 and len(of("episode")) == 6 and len(of("state")) > 0)
    assert {batch.who for batch in batches} == {"n0"} and batches[-1].dropped == 0
    assert sorted(span.args["serial"] for span in of("lease")) == [0, 1, 2]
    assert all(span.args["accepted"] == 1 and span.track.startswith("groups/") for span in of("lease"))
    for episode in of("episode"):
        inside = [span for kind in ("environment", "engine") for span in of(kind) if span.track == episode.track]
        inside.sort(key=lambda span: span.start_s)
        assert [span.name for span in inside] == ["environment", "engine", "environment"]
        assert (episode.args["turns"], inside[1].args) == (1, {"turn": 1})
        assert inside[0].start_s >= episode.start_s
        assert inside[-1].start_s + inside[-1].duration_s == episode.start_s + episode.duration_s
    assert "waiting" in {span.name for span in of("state")}


async def test_spans_whose_heartbeat_failed_are_counted() -> None:
    class Away:
        """Takes spans, and answers only one heartbeat in two."""

        def __init__(self, link: Any) -> None:
            self.link, self.turn, self.lost, self.heard = link, 0, 0, 0

        async def heartbeat(self, *arguments: Any) -> Any:
            self.turn += 1
            batch = arguments[3]
            if self.turn % 2:
                self.lost += len(batch.spans) if batch else 0
                raise BrokerUnreachable("away")
            self.heard = max(self.heard, batch.dropped if batch else 0)
            return await self.link.heartbeat(*arguments)

        async def __aenter__(self) -> "Away":
            return self

        async def __aexit__(self, *_: object) -> None:
            return None

    broker = MemoryBroker(run_info(groups_per_step=4, trace=True))
    with recorded():
        site = Site(broker=broker)
        site.link = away = Away(site.link)  # type: ignore[assignment]
        async with site:
            site.attach(tasks=8)
            before = away.heard
            await until_async(lambda: away.lost > 0 and away.heard > before)
