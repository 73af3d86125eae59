"""The broker's answer to "how are things": counts, learner, nodes, waste."""

from typing import TYPE_CHECKING

from broker.contract import BrokerStatus
from broker.delivery import waste

if TYPE_CHECKING:
    from broker.delivery.state import DeliveryState


def status_of(state: "DeliveryState") -> BrokerStatus:
    """`state` as of now."""
    now = state.clock()
    tasks, fleet = state.tasks, state.fleet
    wasted = fleet.waste()
    return BrokerStatus(
        pid=state.pid,
        address=state.address,
        run=state.run,
        groups_pending=len(tasks.pending),
        groups_ready=len(tasks.ready),
        groups_leased=len(tasks.leased),
        groups_taken=sum(len(serials) for serials in tasks.steps.values()),
        groups_committed=tasks.history.committed,
        groups_dead=tasks.history.dead,
        bytes_held=tasks.bytes_held,
        lease_expiries=state.lease_expiries,
        stale_results=state.stale_results,
        tokens_generated_total=fleet.tokens_generated(),
        tokens_wasted_total=waste.tokens(wasted),
        learner=state.learner.status(now),
        learner_last_seen_s=state.learner.silent_s(now),
        nodes=fleet.status(now),
        oldest_lease_s=max((now - e.leased_at for e in tasks.leased.values()), default=0.0),
        refused_messages=state.refused_messages,
        denied_requests=state.denied_requests,
        quarantined_messages=state.quarantined_messages,
        steps_taken=sum(tasks.places_taken(step) >= state.run.groups_per_step for step in tasks.steps),
        groups_filtered=tasks.filtered,
        waste=wasted,
        full=tasks.bytes_expected() > state.run.max_bytes,
    )
