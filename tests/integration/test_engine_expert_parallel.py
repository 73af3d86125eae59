"""A real vLLM engine whose two workers have whole experts, half of them each; the last test breaks it."""

from collections.abc import Iterator

import pytest

from tests.integration.test_engine_experts import qwen3_moe
from tests.rigs.engines import EngineRig


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), qwen3_moe, tensor_parallel=2, expert_parallel=True)
    yield made
    made.close()


def test_both_workers_load_and_prove_their_experts_and_the_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()
    rig.put(2)
    rig.samples_with(2)


def test_one_element_damaged_in_one_expert_is_caught_and_stops_the_engine(rig: EngineRig) -> None:
    rig.put_damaged(3, "w2_weight")
    rig.is_excluded(2, "has another shard of model.layers.0.mlp.experts")
