"""Supervised tuning on conversations equals plain Hugging Face cross-entropy on what the assistant says."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration import fork_rig, sft_assets

LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "dense": ("dense", 1, {}),
    "dense-dp2": ("dense", 2, {}),
    "dense-tp2": ("dense", 2, {"tensor": 2}),
    "dense-pp2": ("dense", 2, {"pipeline": 2}),
    "dense-cp2": ("dense", 2, {"context": 2}),
    "moe": ("moe", 1, {}),
    "moe-ep2": ("moe", 2, {"expert": 2}),
    "moe-tp2-ep2": ("moe", 2, {"tensor": 2, "expert": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sft-parity")
    sft_assets.write_rows(place / "rows.jsonl")
    worlds = [fork_rig.group(1, "reference", [{"kind": "dense"}, {"kind": "moe"}])]
    for ranks in (1, 2):
        specs = [
            {"name": name, "kind": kind, "parallel": parallel}
            for name, (kind, size, parallel) in LAYOUTS.items()
            if size == ranks
        ]
        worlds.append(fork_rig.group(ranks, "sft", specs))
    fork_rig.run("sft_workers", place, worlds)
    return place


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradients_are_those_of_hugging_face_on_the_same_masked_rows(folder: Path, name: str) -> None:
    kind = LAYOUTS[name][0]
    expected = fork_rig.Outcome(folder / f"reference-{kind}").ranks[0]
    outcome = fork_rig.Outcome(folder / name)
    for rank in outcome.ranks:
        assert rank["tokens"] == expected["tokens"]
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert rank["packs"] > 1, "several microbatches, each of several conversations"
    gradients = load_file(folder / f"gradients-{kind}.safetensors")
    assert set(gradients) <= set(outcome.tensors)
    for tensor, reference in gradients.items():
        error = (outcome.tensors[tensor] - reference).norm() / reference.norm()
        assert error < 1e-5, f"{tensor}: {error:.2e}"
