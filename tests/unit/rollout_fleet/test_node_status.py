"""The report of a node on itself, and when it reached each stage on its way into the job."""

import subprocess
import sys
import time

import pytest

from broker.contract import GroupWork
from common.waits import NO_WAIT, WaitFor, WaitKind
from common.waste import Waste
from common.weights.receive.contract import WeightsState
from rollout_fleet.episode.sampler_protocol import EngineCounters
from rollout_fleet.node.heartbeat import BrokerLost, BrokerTimeout
from rollout_fleet.node.node_status import JoinTimer, NodeStatusTracker, explain, process_age_s
from tests.rigs.refusals import refused
from tests.rigs.waiting import Clock

HELD = WeightsState(version=12, incarnation=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status(clock: Clock) -> NodeStatusTracker:
    return NodeStatusTracker("n", clock)


@pytest.mark.parametrize(
    ("weights", "learner", "episodes", "starting", "leased", "state", "wait"),
    [
        (WeightsState(), None, 0, 0, False, "joining", WaitFor(WaitKind.LEARNER)),
        (WeightsState(), 0, 0, 0, False, "joining", WaitFor(WaitKind.WEIGHTS)),
        (HELD, 0, 0, 0, False, "waiting", WaitFor(WaitKind.TASKS)),
        (HELD, 0, 0, 0, True, "waiting", WaitFor(WaitKind.WINDOW, version=12)),
        (HELD, None, 0, 0, True, "waiting", WaitFor(WaitKind.LEARNER)),
        (HELD, 1, 0, 0, True, "waiting", WaitFor(WaitKind.OTHER_WEIGHTS, count=1)),
        (HELD, 0, 5, 5, True, "environments", WaitFor(WaitKind.ENVIRONMENTS, count=5)),
        (HELD, 0, 5, 4, True, "generating", NO_WAIT),
        (WeightsState(version=12, incarnation=0, flipping=True), 0, 5, 5, True, "flipping", NO_WAIT),
        (
            WeightsState(version=12, excluded="canary differs by 3"),
            0,
            5,
            5,
            True,
            "excluded",
            WaitFor(WaitKind.REPAIR, cause="canary differs by 3"),
        ),
    ],
)
def test_the_explanation_names_who_unblocks_the_node(
    weights: WeightsState, learner: int | None, episodes: int, starting: int, leased: bool, state: str, wait: WaitFor
) -> None:
    found = explain(weights, learner=learner, episodes=episodes, starting=starting, leased=leased)
    assert found == (state, wait)


def test_a_node_whose_scorer_fails_says_so_when_its_episodes_have_ended() -> None:
    for weights, episodes, state, wait in (
        (HELD, 0, "waiting", WaitFor(WaitKind.SCORER, cause="judge: HTTP 503")),
        (HELD, 5, "generating", NO_WAIT),
        (WeightsState(), 0, "joining", WaitFor(WaitKind.WEIGHTS)),
    ):
        found = explain(weights, learner=0, episodes=episodes, starting=0, leased=True, paused="judge: HTTP 503")
        assert found == (state, wait)


def test_a_node_of_the_pool_waits_for_versions_and_its_tokens_are_no_training_tokens(clock: Clock) -> None:
    waits = WaitFor(WaitKind.EVALUATED_VERSION)
    for weights, state in ((WeightsState(), "joining"), (HELD, "waiting")):
        assert explain(weights, learner=0, episodes=0, starting=0, leased=False, pool="eval") == (state, waits)
    unlisted = WeightsState(refused="the learner refused this key")
    for pool in ("eval", ""):
        found = explain(unlisted, learner=0, episodes=0, starting=0, leased=False, pool=pool)
        assert found == ("joining", WaitFor(WaitKind.WEIGHTS, cause="the learner refused this key"))
    status = NodeStatusTracker("n", clock, pool="eval")
    clock.now = 9.0
    status.measure(HELD, EngineCounters(tokens_generated=70), [])
    report = status.report()
    assert (report.pool, report.tokens_generated, report.evaluation_tokens, report.waste) == ("eval", 0, 70, {})


def test_a_node_of_the_fleet_counts_tokens_of_held_out_problems_apart(status: NodeStatusTracker) -> None:
    counters = EngineCounters(tokens_generated=70)
    status.measure(HELD, counters, [], evaluated=30)
    assert (status.report().tokens_generated, status.report().evaluation_tokens) == (40, 30)
    counters.tokens_generated = 100  # a held-out call ended, and the next measurement counts it
    assert status.report().tokens_generated == 40
    status.measure(HELD, counters, [], evaluated=60)
    assert (status.report().tokens_generated, status.report().evaluation_tokens) == (40, 60)


def test_since_counts_from_the_change_of_state_not_of_reason(clock: Clock, status: NodeStatusTracker) -> None:
    for clock.now, kind in ((5.0, WaitKind.TASKS), (7.0, WaitKind.WINDOW)):
        status.show("waiting", WaitFor(kind))
    clock.now = 9.0
    report = status.report()
    assert (report.state, report.wait.kind, report.since_s) == ("waiting", WaitKind.WINDOW, 4.0)


def test_probes_hear_of_the_state_from_the_turns_of_the_loop(status: NodeStatusTracker) -> None:
    def ready() -> bool:
        return status.signs.answer("/readyz")[0] == 200

    for state, expected in (("generating", True), ("waiting", True), ("draining", False), ("excluded", False)):
        before = ready()
        status.show(state)
        assert ready() is before, "the heartbeat's thread alone is no sign of life"
        status.turned()
        assert ready() is expected


def test_a_report_carries_engine_weights_groups_and_waste(clock: Clock, status: NodeStatusTracker) -> None:
    weights = WeightsState(version=3, incarnation=1, flips=4, stall_s=0.5, canary_max_difference=0.01)
    counters = EngineCounters(100, kv_cache_usage=0.75, preemptions=3, prompt_tokens=200, cached_tokens=150)
    status.measure(weights, counters, ["a", "b"])
    status.work(9, [GroupWork(4, 8, finished=2)], 24)
    status.cancelled(5, 1.5)
    for reason in ("timeout", "environment_flood", "timeout"):
        status.sample_failed(reason)
    clock.now = 2.0
    report = status.report()
    assert (report.policy_version, report.flips, report.generation_stall_s) == (3, 4, 0.5)
    assert (report.tokens_generated, report.tokens_wasted, report.tokens_per_s) == (100, 5, 50.0)
    assert report.waste == {"cancelled": Waste(5, 1.5), "stalled": Waste(0, 0.5), "waiting": Waste(0, 0.0)}
    assert (report.episodes_running, report.canary_max_difference, status.leases) == (9, 0.01, ["a", "b"])
    assert report.samples_failed == {"timeout": 2, "environment_flood": 1}
    assert (report.kv_cache_usage, report.preemptions, report.prefix_hit_rate) == (0.75, 3, 0.75)
    assert (report.groups, report.concurrency) == ([GroupWork(4, 8, finished=2)], 24)


def test_waiting_counts_the_time_without_work_also_while_it_lasts(clock: Clock, status: NodeStatusTracker) -> None:
    for clock.now, state in (
        (1.0, "joining"),
        (3.0, "waiting"),
        (3.5, "generating"),
        (7.0, "flipping"),
        (8.0, "waiting"),
    ):
        status.show(state)
    clock.now = 8.25
    for _ in range(2):
        assert status.report().waste["waiting"] == Waste(0, 2.75)
    status.show("draining")
    clock.now = 20.0
    assert status.report().waste["waiting"] == Waste(0, 2.75)


def test_the_rate_covers_the_time_since_the_last_report(clock: Clock, status: NodeStatusTracker) -> None:
    for clock.now, tokens, rate in ((1.0, 100, 100.0), (3.0, 120, 10.0), (3.1, 500, 10.0), (4.0, 500, 380.0)):
        status.measure(HELD, EngineCounters(tokens_generated=tokens), [])
        assert status.report().tokens_per_s == pytest.approx(rate)


def test_patience_ends_after_the_limit_and_any_answer_renews_it(clock: Clock) -> None:
    patience = BrokerTimeout(60.0, "tcp://x", clock)
    patience.failed(RuntimeError("silent"))
    clock.now = 59.0
    patience.failed(RuntimeError("silent"))
    patience.answered()
    clock.now = 100.0
    patience.failed(RuntimeError("silent"))
    clock.now = 160.0
    with refused(BrokerLost, "tcp://x", "60 s", "silent"):
        patience.failed(RuntimeError("silent"))


def test_stages_count_from_the_start_of_the_process_and_only_once(clock: Clock) -> None:
    clock.now, before = 100.0, time.time()
    timer = JoinTimer(3.0, clock)
    assert before - 3.0 <= timer.times.started_s <= time.time() - 3.0
    for clock.now, stage in ((101.5, "registered"), (110.0, "engine")):
        assert timer.reached(stage)
    assert not timer.reached("registered")
    assert (timer.times.registered, timer.times.engine, timer.times.staged) == (4.5, 13.0, 0.0)


def test_the_age_of_a_process_is_counted_from_its_start_not_from_the_import() -> None:
    program = (
        "import time; time.sleep(0.4); from rollout_fleet.node.node_status import process_age_s; print(process_age_s())"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert 0.4 <= float(done.stdout) <= time.monotonic() - started + 0.02
    assert process_age_s() > 0
