"""Every config in configs/ for a named model, in miniature: its layout trains as one rank does."""

import json
from pathlib import Path

import pytest

from common.config.loading import load_either
from common.config.parallel_layout import layers_per_stage
from tests.integration import fork_rig
from tests.integration.miniatures import RANKS, ROOT, miniature

NAMES = [
    *("qwen3-0.6b-gsm8k", "llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b", "qwen3-235b-a22b-sft"),
    *("mixtral-8x7b", "mixtral-8x7b-sft", "deepseek-v3", "deepseek-v3-sft"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("miniatures")
    alone = [{"name": name, "alone": True} for name in NAMES]
    sizes = {name: miniature(name).ranks for name in NAMES}
    together = [
        fork_rig.group(size, "train", [{"name": n, "alone": False} for n in NAMES if sizes[n] == size])
        for size in sorted(set(sizes.values()))
    ]
    worlds = [fork_rig.group(1, "model", alone), fork_rig.group(1, "train", alone), *together]
    fork_rig.run("miniature_workers", place, worlds)
    return place


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_trains_as_on_one_rank(folder: Path, name: str) -> None:
    (one,) = fork_rig.Outcome(folder / f"{name}-one").ranks
    together = fork_rig.Outcome(folder / f"{name}-all").ranks
    assert len(together) == miniature(name).ranks > 1
    for rank in together:
        for found, expected in zip(rank["steps"], one["steps"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_batch_gets_better(folder: Path, name: str) -> None:
    for outcome in ("one", "all"):
        ranks = fork_rig.Outcome(folder / f"{name}-{outcome}").ranks
        by_replica = {rank["stage"]["data"]: rank for rank in ranks}
        before, after = (sum(rank[when] for rank in by_replica.values()) for when in ("before", "after"))
        assert after < before


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3-0.6b-gsm8k", dict(data=4)),
        ("llama-3.1-70b", dict(tensor=4, pipeline=2)),
        ("llama-3.1-405b", dict(tensor=2, pipeline=2, context=2)),
        ("deepseek-v3", dict(pipeline=4, expert=2, data=2)),
        ("qwen3-235b-a22b", dict(tensor=2, pipeline=2, expert=4, data=2)),
        ("mixtral-8x7b", dict(tensor=2, pipeline=2, expert=4, data=2)),
    ],
)
def test_parallel_sizes_are_the_largest_that_the_ranks_allow(name: str, sizes: dict[str, int]) -> None:
    small = miniature(name)
    assert small.ranks <= RANKS
    found = {axis: getattr(small.learner.parallel, axis, 0) for axis in sizes if axis != "data"}
    assert found | {"data": small.learner.data_parallel} == {"data": 1} | sizes


@pytest.mark.parametrize("name", NAMES)
def test_features_are_kept(name: str) -> None:
    small, config = miniature(name), load_either(ROOT / "configs" / f"{name}.yaml")
    real = json.loads((ROOT / config.model.path / "config.json").read_text())
    assert small.document.keys() == real.keys()
    kept = ("architectures", "model_type", "tie_word_embeddings", "norm_topk_prob", "scoring_func", "topk_method")
    assert [small.document.get(key) for key in kept] == [real.get(key) for key in kept]
    assert (small.document.get("rope_scaling") is None) == (real.get("rope_scaling") is None)
    assert (small.learner.memory, small.learner.moe) == (config.learner.memory, config.learner.moe)
    stages = [set(layers_per_stage(d["num_hidden_layers"], p)) for d, p in (
        (real, config.learner.parallel), (small.document, small.learner.parallel))]  # fmt: skip
    assert (len(stages[0]) > 1) == (len(stages[1]) > 1)
