"""docs/weights.md shows the committed figures, and says of every deadline what the code does."""

import json

from bench.weights_page import BEGIN, END, PAGE, RESULTS, render
from common.config.schema import WeightsConfig
from common.weights.collectives import bucket_timeout


def test_the_page_is_what_the_committed_results_say() -> None:
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0].strip() == render(), "run bench/weights_page.py"


def test_the_results_were_measured_with_the_defaults_and_with_enough_rounds() -> None:
    results = json.loads((RESULTS / "weight_broadcast.json").read_text())
    assert results["timeout_s"] == WeightsConfig().timeout_s
    assert all(r["rounds"] >= 4 for r in results["broadcast"])
    for death in results["death"]:
        assert death["worst_s"] < results["timeout_s"], death


def test_the_deadlines_on_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    assert bucket_timeout(20.0) == 5.0 and "a quarter of `weights.timeout_s`" in text
    from learner.publish.receiver_state import PEER_WAIT_S
    from learner.publish.relay import PEER_FETCHES
    from learner.publish.routes import MAX_ATTEMPTS
    from rollout_fleet.weights.weight_client import REJOIN_AFTER_S

    assert f"{MAX_ATTEMPTS} attempts" in text
    assert f"{PEER_WAIT_S:g} s for a peer's answer" in text and f"{PEER_FETCHES} fetches at a time" in text
    assert f"{REJOIN_AFTER_S:g} s without a word" in text
