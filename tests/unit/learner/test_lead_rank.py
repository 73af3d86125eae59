"""The lead's small parts: stall accounting and what it says it waits for."""

from broker.contract import BrokerStatus, NodeReport, NodeStatus, RunInfo
from learner.loop.lead_rank import StallMeter
from tests.unit.learner.loop_fakes import MakeWorld


def status(*nodes: tuple[str, int, float]) -> BrokerStatus:
    """(id, pid, seconds stalled so far) per node."""
    return BrokerStatus(
        pid=1,
        address="",
        run=RunInfo("r", "d", 2, 1, 3, 60.0, 1),
        groups_pending=0,
        groups_ready=0,
        groups_leased=0,
        groups_taken=0,
        groups_committed=0,
        groups_dead=0,
        bytes_held=0,
        lease_expiries=0,
        stale_results=0,
        tokens_generated_total=0,
        tokens_wasted_total=0,
        learner=None,
        learner_last_seen_s=0.0,
        nodes=[
            NodeStatus(NodeReport(name, pid, "h", "generating", 0, generation_stall_s=stall), 0, True, 0.0)
            for name, pid, stall in nodes
        ],
    )


def test_stalls_are_differences_of_running_totals() -> None:
    meter = StallMeter()
    assert meter.advance(status(("a", 1, 5.0))) == 0.0
    assert meter.advance(status(("a", 1, 5.25), ("b", 2, 0.5))) == 0.75
    assert meter.advance(status(("a", 1, 5.25), ("b", 2, 0.5))) == 0.0


def test_a_node_that_restarts_counts_from_zero_and_one_that_is_away_loses_nothing() -> None:
    meter = StallMeter()
    meter.advance(status(("a", 1, 5.0)))
    assert meter.advance(status()) == 0.0
    assert meter.advance(status(("a", 1, 5.5))) == 0.5
    assert meter.advance(status(("a", 9, 0.25))) == 0.25


def test_the_wait_names_who_unblocks_it(make_world: MakeWorld) -> None:
    world = make_world()
    world.trainer.source.next_command(0)
    report = world.lead.reporter.snapshot()
    assert (report.state, report.waiting_on) == ("waiting", "groups for step 0: 0 of 2 ready, no node is connected")
    world.fleet.work()  # the node registers; it has no weights yet
    world.memory.state.fleet.nodes["fake"].report = NodeReport("fake", 1, "here", "starting", -1, "the engine's start")
    world.trainer.source.next_command(0)
    assert world.lead.reporter.snapshot().waiting_on.endswith(
        "none being generated: fake is starting (the engine's start)"
    )
    state = world.memory.state
    state.register(NodeReport("fake", 1, "here", "environments", 0, "the start of 2 environments"))
    (lease,) = state.lease("fake", 0, 1)
    world.trainer.source.next_command(0)
    assert world.lead.reporter.snapshot().waiting_on.endswith(
        "none being generated: fake waits for the start of 2 environments"
    )
    state.release("fake", [lease.token])
    world.trainer.run()
    assert world.lead.reporter.snapshot().state == "checkpointing"
