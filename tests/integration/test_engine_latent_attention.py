"""Latent attention (DeepSeek-V3) in the real engine: its decoding is flipped, and proven by a canary that decodes."""

from collections.abc import Iterator
from typing import Any

import pytest

from common.weights.wire.messages import Canary
from tests.integration.test_engine_flips import CASES
from tests.rigs.engines import EngineRig, logprobs, nudged
from tests.rigs.tiny_models import new_model
from tests.rigs.waiting import until


def make(seed: int) -> Any:
    kind, changes, _ = CASES["DeepseekV3"]
    return new_model(kind, seed, num_hidden_layers=2, **changes)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), make)
    yield made
    made.close()


def test_the_first_version_is_proven_and_its_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()
    rig.samples_with(1)


def test_a_small_step_that_comes_as_a_delta_decodes_with_the_new_weights(rig: EngineRig) -> None:
    rig.put(2, model=nudged(rig.models[1]))
    whole = sum(parameter.nbytes for parameter in rig.models[2].parameters())
    until(lambda: rig.publisher.stats().version_active == 2)
    assert rig.publisher.stats().publish_bytes < 0.5 * whole
    rig.samples_with(2)


def test_decoding_with_other_weights_than_prefill_is_caught_and_stops_the_engine(rig: EngineRig) -> None:
    """Every parameter is right, and so is every log-probability of a prompt."""
    rig.run(rig.engine.spoil_decoding())
    tokens = [(i * 11) % 90 + 4 for i in range(32)]
    rig.put(3, Canary(tokens, logprobs(make(3), tokens), tolerance=0.01))
    rig.is_excluded(2, "canary differs from itself between decoding and prefill")
