"""A real vLLM engine over two workers, fed by the same flat layout as an engine of one.

One engine serves the file; the last test breaks it.
"""

import os
from collections.abc import Iterator

import msgspec
import psutil
import pytest
import torch

from rollout_fleet.vllm_patches.shared_files import FOLDER, PREFIX, Worker, remove_left_files
from tests.rigs.engines import EngineRig, logprobs, prompt, worst


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), tensor_parallel=2)
    yield made
    files = recorded()
    made.close()
    assert not [name for name in files if (FOLDER / name).exists()]


def recorded() -> list[str]:
    """Names of the shared memory files that this test's engine has on record."""
    records = [msgspec.json.decode(path.read_bytes()) for path in FOLDER.glob(f"{PREFIX}*")]
    workers = [worker for found in records for worker in msgspec.convert(found["workers"], list[Worker])]
    ours = [w for w in workers if os.getpid() in [parent.pid for parent in psutil.Process(w.pid).parents()]]
    return [name for worker in ours for name in worker.files]


def test_both_workers_get_load_and_prove_their_shards_and_the_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()


def test_a_flip_in_flight_is_exact_in_every_token(rig: EngineRig) -> None:
    for i, got in enumerate(rig.flip_in_flight(2, requests=4, tokens=300)):
        assert {run.version for run in got.version_runs} <= {1, 2} and len(got.tokens) == 300
        start = got.version_runs[-1].start if len(got.version_runs) == 2 else len(got.tokens)
        assert worst(got.logprobs[:start], logprobs(rig.models[1], prompt(i) + got.tokens[:start])[11:]) < 1e-4
    assert rig.engine.weights.version == 2


def test_the_shared_memory_of_the_workers_is_on_record_and_stays_while_they_live() -> None:
    from vllm import _custom_ops  # noqa: F401  (loads the library)

    files = recorded()
    # vLLM's library for CPUs without AVX-512 has no collectives over shared memory
    assert any(name.startswith("vllm_dist_") for name in files) is hasattr(torch.ops._C, "init_shm_manager"), files
    assert remove_left_files() == []
    assert all((FOLDER / name).exists() for name in files)


def test_one_element_damaged_in_one_shard_is_caught_and_stops_the_engine(rig: EngineRig) -> None:
    rig.put_damaged(3, "down_proj")
    rig.is_excluded(2, "of 2 has another shard of model.layers.0.mlp.down_proj.weight")
