"""Mixture of experts in real Megatron against plain transformers: frozen routers, balancing, at every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import fork_rig
from tests.integration.fork_rig import group, relative, section

CASES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "glm", "moe": {}},
    "frozen": {"kind": "qwen", "moe": {"freeze_router": True}},
    "balanced": {"kind": "qwen", "moe": {"balance": "aux_loss"}},
    "by-document": {"kind": "qwen", "moe": {"balance": "aux_loss"}, "loss": "documents"},
    "biased": {"kind": "glm", "moe": {"balance": "bias"}},
    "replayed": {"kind": "qwen", "moe": {"replay_routing": True}},
    "replayed-normed": {"kind": "normed", "moe": {"replay_routing": True}},
    "replayed-biased": {"kind": "glm", "moe": {"replay_routing": True}},
    "replayed-again": {"kind": "qwen", "moe": {"replay_routing": True}, "recompute": "full"},
    "balanced-again": {"kind": "qwen", "moe": {"balance": "aux_loss"}, "recompute": "full"},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, {"expert": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "cp2-tp2": (4, {"context": 2, "tensor": 2}),
    "cp2-ep2": (4, {"context": 2, "expert": 2}),
}
# A layout of two kinds of parallelism proves both of them: what is in one of these is not repeated alone.
ALL_KINDS = ("one", "dp2", "vpp2", "tp2-pp2-ep2", "cp2-tp2", "cp2-ep2")
PAIRS = [
    *[("frozen", layout) for layout in ("one", "tp2-pp2-ep2")],
    *[(case, layout) for case in ("balanced", "replayed") for layout in ALL_KINDS],
    *[("biased", layout) for layout in ("one", "dp2", "ep2", "pp2", "cp2-tp2")],
    *[("plain", "ep2"), ("by-document", "dp2"), ("by-document", "cp2-tp2")],
    *[("replayed-normed", "ep2"), ("replayed-biased", "pp2"), ("replayed-biased", "cp2-tp2")],
    *[(case, layout) for case in ("replayed-again", "balanced-again") for layout in ("vpp2", "cp2-tp2")],
]


def pairs(*cases: str) -> Any:
    return pytest.mark.parametrize(("case", "layout"), [pair for pair in PAIRS if not cases or pair[0] in cases])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers and every layout make of every case."""
    place = tmp_path_factory.mktemp("experts")
    (place / "models").mkdir()
    worlds = [group(1, "expert-reference", [{"name": n, **c} for n, c in CASES.items()])]
    for ranks in sorted({ranks for ranks, _ in LAYOUTS.values()}):
        specs = [
            {"name": f"{case}-{layout}", **CASES[case], "parallel": LAYOUTS[layout][1]}
            for case, layout in PAIRS
            if LAYOUTS[layout][0] == ranks
        ]
        worlds.append(group(ranks, "experts", specs))
    fork_rig.run("expert_workers", place, worlds)
    return place


class Outcome(fork_rig.Outcome):
    """A case under a layout, beside its reference."""

    def __init__(self, folder: Path, case: str, layout: str) -> None:
        super().__init__(folder / f"{case}-{layout}")
        self.expected = load_file(folder / f"reference-{case}.safetensors")

    def both(self, prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return self.section(prefix), section(self.expected, prefix)


@pairs()
def test_logprobs_and_every_gradient_equal_hugging_face(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    found, expected = outcome.both("logprobs")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=3e-5)
    found, expected = outcome.both("gradient")
    assert found.keys() == expected.keys()
    errors = {name: relative(found[name], gradient) for name, gradient in expected.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])
    for rank in outcome.ranks:
        assert rank["steps"][0][1] == pytest.approx(outcome.expected["norm"].item(), rel=1e-5)


@pairs("frozen")
def test_a_frozen_router_has_no_gradient_and_stays_bitwise(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    before, after = outcome.section("weight"), outcome.section("trained")
    routers = [name for name in before if ".gate.weight" in name]
    assert len(routers) == 4
    for name in routers:
        assert f"gradient.{name}" not in outcome.tensors
        assert torch.equal(after[name], before[name]), name
    source = load_file(folder / "models" / "qwen" / "model.safetensors")
    assert all(torch.equal(before[name], source[name]) for name in routers)


@pairs("frozen")
def test_steps_with_frozen_routers_equal_torch_adamw_with_frozen_gates(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    before = outcome.section("weight")
    found, expected = outcome.both("trained")
    for name, reference in expected.items():
        moved = (reference - before[name]).double().norm()
        assert (found[name] - reference).double().norm() <= 1e-2 * moved, name


def test_the_balance_is_large_enough_in_the_reference_to_be_missed(folder: Path) -> None:
    balanced = section(load_file(folder / "reference-balanced.safetensors"), "gradient")
    frozen = section(load_file(folder / "reference-frozen.safetensors"), "gradient")  # same loss, no balance
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert relative(balanced[name], frozen[name]) > 1e-2


@pairs("replayed", "replayed-normed", "replayed-biased", "replayed-again")
def test_replayed_tokens_are_counted_and_so_are_those_sent_elsewhere(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    changed, known = outcome.expected["routing"].tolist()
    assert 0.02 * known < changed < 0.9 * known
    assert [rank["routing"] for rank in outcome.ranks] == [[changed, known]] * len(outcome.ranks)


def test_replay_changes_gradients_enough_to_be_missed(folder: Path) -> None:
    replayed = section(load_file(folder / "reference-replayed.safetensors"), "gradient")
    free = section(load_file(folder / "reference-frozen.safetensors"), "gradient")  # same loss, own routing
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert relative(replayed[name], free[name]) > 1e-2


@pairs("biased")
def test_the_bias_moves_against_the_load_of_the_whole_batch(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    found, expected = outcome.section("first"), section(outcome.expected, "bias")
    assert found.keys() == expected.keys() and len(expected) == 3
    for name, bias in expected.items():
        torch.testing.assert_close(found[name], bias, rtol=0, atol=1e-7)
        assert not torch.equal(bias, outcome.tensors[f"weight.{name}"])


@pairs("plain")
def test_a_loaded_bias_stays_as_it_is_unless_balancing_is_asked_for(folder: Path, case: str, layout: str) -> None:
    outcome = Outcome(folder, case, layout)
    for name, bias in outcome.section("trained").items():
        if name.endswith("correction_bias"):
            assert torch.equal(bias, outcome.tensors[f"weight.{name}"]), name
