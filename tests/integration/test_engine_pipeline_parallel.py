"""A real vLLM engine of two pipeline stages, fed by the flat layout of an engine of one; the last test breaks it."""

from collections.abc import Iterator

import pytest

from tests.rigs.engines import EngineRig, logprobs, prompt, worst


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), pipeline_parallel=2)
    made.run(made.engine.allocate_stage_inputs())
    yield made
    made.close()


def test_both_stages_get_load_and_prove_their_layers_and_the_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()
    rig.samples_with(1)


def test_a_flip_with_batches_in_both_stages_is_exact_in_every_token(rig: EngineRig) -> None:
    for i, got in enumerate(rig.flip_in_flight(2, requests=4, tokens=300)):
        assert {run.version for run in got.version_runs} <= {1, 2} and len(got.tokens) == 300
        start = got.version_runs[-1].start if len(got.version_runs) == 2 else len(got.tokens)
        assert worst(got.logprobs[:start], logprobs(rig.models[1], prompt(i) + got.tokens[:start])[11:]) < 1e-4
    assert rig.engine.weights.version == 2


@pytest.mark.parametrize("part", ["layers.1.mlp.down_proj"])  # only the second stage has it
def test_one_element_damaged_in_the_second_stage_is_caught_and_stops_the_engine(rig: EngineRig, part: str) -> None:
    rig.put_damaged(3, part)
    rig.is_excluded(2, "has another shard of model.layers.1.mlp.down_proj.weight")
