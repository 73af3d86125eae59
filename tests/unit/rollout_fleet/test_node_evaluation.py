"""A node that plays held-out problems: temperature, version binding, and what it counts."""

import asyncio
from typing import Any

import msgspec
import pytest

from common.errors import BrokerError
from common.evaluation import EvaluationOrder, EvaluationResult
from rollout_fleet.episode.driver import Sampling
from rollout_fleet.node import running_groups
from tests.rigs.telemetry import recorded
from tests.rigs.waiting import until_async
from tests.unit.rollout_fleet.fleet_fakes import add, addition_task, say
from tests.unit.rollout_fleet.test_node import Site

ORDER = EvaluationOrder(version=0, incarnation=0, temperature=0.0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_groups, "RETRY_S", 0.01)


def results(site: Site, order: EvaluationOrder = ORDER) -> list[EvaluationResult]:
    return site.learner.evaluate(order, [], [], True).results


async def test_a_shared_node_plays_problems_before_tasks_at_their_own_temperature_and_counts_them_apart() -> None:
    async with Site() as site:
        site.learner.evaluate(ORDER, [addition_task(n, 3) for n in range(2)], [], True)
        site.attach(tasks=1)
        await until_async(lambda: len(results(site)) == 2 and site.states() == ["ready"])
        calls = [(call.prompt, call.temperature) for call in site.sampler.calls]
        assert sorted(temperature for _, temperature in calls) == [0.0] * 6 + [1.0] * 2
        assert [temperature for _, temperature in calls[:4]] == [0.0] * 4, "the problems come first"
        assert site.driver.rules.sampling == Sampling(), "that of the training stays"
        found = {result.problem: result for result in results(site)}
        assert found[1].rewards == [1.0] * 3 and found[1].errors == [""] * 3
        assert found[1].stop_reasons == ["stop"] * 3 and min(found[1].lengths) > 0
        assert (found[1].node_id, found[1].version_min, found[1].version_max) == ("n0", 0, 0)
        assert found[1].seconds > 0 and found[1].started_s > 1e9
        tokens = sum(sum(result.lengths) for result in found.values())
        await until_async(lambda: site.status.report().evaluation_tokens == tokens)
        assert site.status.report().waste["cancelled"].tokens == 0
        await until_async(lambda: site.status.report().state == "waiting")


@pytest.mark.parametrize("accepted", [True, False])
async def test_the_span_of_a_problem_says_whether_the_broker_accepted_its_result(accepted: bool) -> None:
    with recorded() as spans:
        async with Site(gated=True) as site:
            site.learner.evaluate(ORDER, [addition_task(0)], [], True)
            site.attach(tasks=0)
            await until_async(lambda: site.sampler.most_at_once == 2)
            if not accepted:
                site.learner.evaluate(None, [], [])  # the round ends before the node hears of it
            site.sampler.gate.set()
            await until_async(lambda: [span for span in spans() if span.kind == "lease"])
    [lease] = [span for span in spans() if span.kind == "lease"]
    assert (lease.args["problem"], lease.args["accepted"]) == (0, int(accepted))


async def test_samples_that_fail_are_results() -> None:
    async with Site(respond=lambda prompt: ValueError("too long")) as site:
        site.learner.evaluate(ORDER, [addition_task(0)], [], True)
        site.attach(tasks=0)
        await until_async(lambda: results(site))
        [found] = results(site)
        assert found.rewards == [0.0, 0.0] and all("too long" in error for error in found.errors)
        assert (found.version_min, found.lengths) == (-1, [0, 0])


class Refusing:
    """A client whose broker refuses results, as it does for a reward beyond the wire's limits."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def complete_evaluation(self, *_: object) -> bool:
        raise BrokerError("does not decode: expected float <= 1e300")


async def test_a_refused_result_costs_attempts_of_its_problem_and_not_the_node() -> None:
    async with Site(wrap=Refusing) as site:
        site.learner.evaluate(ORDER, [addition_task(0)], [], True)
        site.attach(tasks=1)
        await until_async(lambda: results(site) and site.states() == ["ready"])
        [found] = results(site)
        assert found.stop_reasons == ["lost"] * 2 and "1e300" in found.errors[0]
        assert not site.running.done(), "it goes on with the training's tasks"


@pytest.mark.parametrize("changes", [{"incarnation": 1}, {"version": 1}])
async def test_a_problem_goes_back_when_the_weights_are_others_than_the_rounds(changes: dict[str, Any]) -> None:
    order = ORDER if "incarnation" in changes else msgspec.structs.replace(ORDER, incarnation=0)
    async with Site(gated=True) as site:
        site.learner.evaluate(order, [addition_task(0)], [], True)
        site.attach(tasks=0)
        await until_async(lambda: site.sampler.most_at_once == 2)
        site.feed.set(**changes)  # while the samples are being generated
        site.sampler.gate.set()
        await until_async(lambda: not site.learner.status().evaluation.leased)
        assert results(site, order) == []
        assert site.learner.status().evaluation.pending == 1


async def test_an_order_for_another_incarnation_is_not_played() -> None:
    async with Site() as site:
        other = msgspec.structs.replace(ORDER, incarnation=7)
        site.learner.evaluate(other, [addition_task(0)], [], True)
        site.attach(tasks=1)
        await until_async(lambda: site.states() == ["ready"])
        assert results(site, other) == []
        assert not [call for call in site.sampler.calls if call.temperature == 0.0]


async def test_a_round_that_ends_cancels_its_problems_and_nothing_counts_as_waste() -> None:
    async with Site(gated=True) as site:
        site.learner.evaluate(ORDER, [addition_task(0)], [], True)
        site.attach(tasks=0)
        await until_async(lambda: site.sampler.most_at_once == 2)
        site.learner.evaluate(None, [], [])
        await until_async(lambda: site.node.groups.episodes_running == 0)
        assert site.status.report().waste["cancelled"].tokens == 0
        assert site.status.report().waste["cancelled"].seconds == 0


async def test_a_heartbeat_says_which_groups_are_problems() -> None:
    async with Site(gated=True, respond=lambda prompt: say(" =0") if "9" in prompt else add(prompt)) as site:
        site.learner.evaluate(ORDER, [addition_task(0)], [], True)
        site.attach(tasks=1)
        await until_async(lambda: len(site.status.report().groups) == 2)
        assert sorted(group.evaluates for group in site.status.report().groups) == [-1, 0]
        site.sampler.gate.set()
        await asyncio.sleep(0)
