"""Overlapped reduction of gradients and gathering of parameters change no bit of what is trained, read or saved."""

from pathlib import Path
from typing import Any

import pytest

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same
from tests.rigs.tiny_models import (
    TEMPERATURE,
    exported,
    figures,
    microbatches,
    policy_loss,
    save_checkpoint,
    share,
)

# Parameters in a bucket: a tiny model gets several buckets, as a large one does. Their sizes need pads between them.
BUCKETS = {"extra": {"bucket_size": 8_000}, "optimizer": {"grad_clip": 0.0}}
# With two ranks that reduce, a sum has two terms, whose order changes no bit. Buckets change the shards over which the
# gradient's norm is summed up, so its last bits differ. Gradients are not clipped by it where there are several.
KINDS: dict[str, dict[str, Any]] = {
    "one-bucket": {"ranks": 2, "extra": {}, "optimizer": {}},
    "bf16-recompute": {"ranks": 2, "dtype": "bfloat16", "memory": {"recompute": "full"}},
    "cp2": {"parallel": {"context": 2}},
    "vpp2-dp2": {"ranks": 4, "kind": "tied-deep", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "ep2-dp2": {"ranks": 2, "kind": "moe", "parallel": {"expert": 2}},
    "offload": {"ranks": 2, "memory": {f"offload_{k}": True for k in ("optimizer", "gradients", "parameters")}},
}


def specs(overlap: bool) -> list[dict[str, Any]]:
    return [{"name": f"{n}-{overlap}", "overlap": overlap, **BUCKETS, **more} for n, more in KINDS.items()]


def job_steps(folder: Path, spec: dict[str, Any]) -> None:
    """Steps with every other reader of the parameters after one of them, and what Megatron was told to do."""
    backend = tiny_models.backend(folder, spec)
    steps = [figures(backend, 0)]
    fewer = backend.train_step(share(backend, microbatches(2)[:2]), policy_loss, TEMPERATURE, entropy=True)
    steps.append([fewer.loss, fewer.grad_norm, fewer.lr])
    reference = backend.reference_logprobs(share(backend, microbatches(0)), TEMPERATURE)
    tensors = tiny_models.numbered(backend, reference, "reference")
    steps.append(figures(backend, 3))
    tensors |= exported(backend, "exported")
    steps.append(figures(backend, 4))
    save_checkpoint(backend, folder / "checkpoints" / spec["name"])
    tensors |= exported(backend, "went")
    steps.append(figures(backend, 5))
    backend.load_checkpoint(folder / "checkpoints" / spec["name"])
    tensors |= exported(backend, "came") | tiny_models.logprobs(backend)
    steps.append(figures(backend, 5))
    tensors |= exported(backend, "last")
    backend.load_checkpoint(folder / "checkpoints" / spec["name"].replace("True", "False"))
    steps.append(figures(backend, 5))
    config = backend.chunks[0].ddp_config
    groups = [len(chunk.bucket_groups) for chunk in backend.chunks]
    told = {"reduce": config.overlap_grad_reduce, "gather": config.overlap_param_gather, "groups": groups}
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, {"steps": steps, "told": told})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = group(tiny_models.job_models, [{"kinds": ["tied", "tied-deep", "moe"]}])
    return forked_ranks.run(tmp_path_factory, models, group(job_steps, [*specs(False), *specs(True)], shared=True))


@pytest.mark.parametrize("name", KINDS)
def test_training_with_and_without_overlap_is_bitwise_the_same(folder: Path, name: str) -> None:
    plain, found = Outcome(folder / f"{name}-False"), Outcome(folder / f"{name}-True")
    for ours, theirs in zip(found.ranks, plain.ranks, strict=True):
        for (loss, norm, rate), expected in zip(ours["steps"], theirs["steps"], strict=True):
            assert [loss, rate] == expected[::2]
            assert norm == expected[1] if name == "one-bucket" else abs(norm / expected[1] - 1) < 1e-6
    same(found.tensors, plain.tensors)
    same(found.section("came"), found.section("went"))
    for rank in found.ranks:
        assert rank["steps"][4] == rank["steps"][5] == rank["steps"][6]


@pytest.mark.parametrize("name", KINDS)
def test_overlap_is_on_by_default_where_ranks_share_gradients(folder: Path, name: str) -> None:
    plain, found = Outcome(folder / f"{name}-False").ranks, Outcome(folder / f"{name}-True").ranks
    assert not any(rank["told"]["reduce"] or rank["told"]["gather"] for rank in plain)
    assert all(rank["told"]["reduce"] for rank in found)
    assert all(rank["told"]["gather"] == (name != "offload") for rank in found)  # parameters that leave are gathered
    assert (found[0]["told"]["groups"][0] > 2) == (name != "one-bucket")
