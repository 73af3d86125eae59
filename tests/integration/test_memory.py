"""Recomputation changes no gradient, offloading no bit; and what is put away is not on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import fork_rig
from tests.integration.fork_rig import Outcome, group

LAYERS, MICROBATCHES = 4, 4
HOW = ("none", "selective", "full")
KINDS = ("optimizer", "gradients", "parameters")


def recomputed(name: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": f"{name}-{how}", "memory": {"recompute": how}, **more} for how in HOW]


RECOMPUTE = {
    1: [("dense", {}), ("moe", {"kind": "moe"})],
    2: [
        ("tp2", {"parallel": {"tensor": 2}}),
        ("cp2", {"parallel": {"context": 2}}),
        ("vpp2", {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
        ("ep2-tp2", {"kind": "moe", "parallel": {"tensor": 2, "expert": 2}}),
    ],
}
NAMES = [name for specs in RECOMPUTE.values() for name, _ in specs]
NOTHING = dict.fromkeys(KINDS, False)


def offloaded(base: str, *kinds: str, **more: Any) -> dict[str, Any]:
    name = f"{base}-{'all' if len(kinds) == 3 else '-'.join(kinds) or 'nothing'}"
    return {"name": name, "base": base, "kinds": kinds, "memory": {f"offload_{k}": True for k in kinds}, **more}


ONE = [
    *(offloaded("fp32", *kinds) for kinds in [(), *((k,) for k in KINDS), KINDS]),
    *(offloaded("bf16", *kinds, dtype="bfloat16") for kinds in [(), *((k,) for k in KINDS), KINDS]),
]
TWO = [
    *(offloaded("dp2", *kinds) for kinds in [(), KINDS]),
    *(offloaded("tp2-bf16", *kinds, dtype="bfloat16", parallel={"tensor": 2}) for kinds in [(), KINDS]),
    *(offloaded("pp2", *kinds, parallel={"pipeline": 2}) for kinds in [(), KINDS]),
    *(offloaded("ep2", *kinds, kind="moe", parallel={"expert": 2}) for kinds in [(), KINDS]),
]
OFFLOADED = [spec for spec in ONE + TWO if spec["kinds"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("memory")
    for name in ("checkpoints", "saved"):
        (place / name).mkdir()
    recompute = [
        group(ranks, "recompute", [spec for name, more in specs for spec in recomputed(name, **more)])
        for ranks, specs in RECOMPUTE.items()
    ]
    worlds = [
        group(1, "models", [{"kind": kind} for kind in ("tied", "moe", "wide")]),
        *recompute,
        group(1, "offload", ONE),
        group(2, "offload", TWO),
        group(1, "resident", [{"name": "wide", "kind": "wide", "memory": {"offload_gradients": True}}]),
    ]
    fork_rig.run("memory_workers", place, worlds)
    return place


def named(specs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[s["name"] for s in specs])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", HOW[1:])
def test_recomputation_changes_no_gradient(folder: Path, name: str, how: str) -> None:
    kept, computed = Outcome(folder / f"{name}-none"), Outcome(folder / f"{name}-{how}")
    assert [rank["loss"] for rank in computed.ranks] == [rank["loss"] for rank in kept.ranks]
    assert kept.tensors and computed.tensors.keys() == kept.tensors.keys()
    for key, gradient in kept.tensors.items():
        assert gradient.norm() > 0
        assert (computed.tensors[key] - gradient).norm() <= 1e-6 * gradient.norm(), key


@pytest.mark.parametrize("name", NAMES)
def test_full_recomputation_runs_layers_twice_and_selective_their_attention(folder: Path, name: str) -> None:
    def calls(how: str) -> tuple[int, int]:
        ranks = Outcome(folder / f"{name}-{how}").ranks
        return sum(rank["calls"]["layer"] for rank in ranks), sum(rank["calls"]["attention"] for rank in ranks)

    layers, attentions = calls("none")
    assert layers == attentions > 0
    assert calls("selective") == (layers, 2 * layers)
    assert calls("full") == (2 * layers, 2 * layers)


@named(OFFLOADED)
def test_training_is_bitwise_the_same_with_offloading(folder: Path, spec: dict[str, Any]) -> None:
    plain, found = Outcome(folder / f"{spec['base']}-nothing"), Outcome(folder / spec["name"])
    assert [rank["steps"] for rank in found.ranks] == [rank["steps"] for rank in plain.ranks]
    assert found.tensors.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


@named(ONE + TWO)
def test_a_checkpoint_brings_the_step_back_bitwise_whatever_is_offloaded(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    for rank in found.ranks:
        assert rank["steps"][3] == rank["steps"][4]
    went, came = found.section("went"), found.section("came")
    assert went and went.keys() == came.keys()
    for name, tensor in went.items():
        assert torch.equal(came[name], tensor), name


@named(ONE + TWO)
def test_what_is_offloaded_has_no_storage_between_phases_and_the_rest_has(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / spec["name"]).ranks:
        for number, idle in enumerate(rank["idle"]):
            for kind, sizes in idle.items():
                if kind == "optimizer" and number == 0 and spec.get("dtype") is None:
                    assert not sizes  # float32 parameters are their own main parameters, and no state exists yet
                elif kind in spec["kinds"]:
                    assert sizes and not any(sizes), (number, kind)
                else:
                    assert sizes and all(sizes), (number, kind)


def test_freed_gradients_are_memory_given_back_to_the_system(folder: Path) -> None:
    found = Outcome(folder / "wide").ranks[0]
    before, within, after = found["resident"]
    assert found["gradients"] > 15 << 20
    assert min(within - before, within - after) > 0.9 * found["gradients"]
