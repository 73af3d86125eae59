"""Every supported architecture through real Megatron, against plain Hugging Face transformers, in float32.

One run of architecture_workers.py does all the work; the tests compare what it left behind.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import fork_rig
from tests.integration.architecture_models import REFUSED
from tests.integration.fork_rig import group, section

DENSE = ["qwen2", "qwen2.5-untied", "qwen2-window", "qwen3", "llama", "llama-linear", "llama-tied", "mistral"]
LATENT = ["deepseek-v3", "deepseek-v3-rope", "deepseek-v3-plain"]
MOE = ["mixtral", "mixtral-window", "qwen3-moe", "qwen3-moe-normed", *LATENT, "glm4-moe"]
SPLIT = {
    "tp2": ({"tensor": 2}, ["qwen2", "llama", "mistral", "mixtral", "deepseek-v3", "deepseek-v3-plain"]),
    "pp2": ({"pipeline": 2}, ["qwen2-window", "llama-tied", "mixtral", "deepseek-v3", "glm4-moe"]),
    "ep2": ({"expert": 2}, ["mixtral", "qwen3-moe-normed", "deepseek-v3", "glm4-moe"]),
    "cp2": ({"context": 2}, ["mistral", "mixtral", "deepseek-v3"]),
}
ONE: list[dict[str, Any]] = [{"name": kind, "kind": kind} for kind in DENSE + MOE]
TWO: list[dict[str, Any]] = [
    {"name": f"{kind}-{way}", "kind": kind, "parallel": parallel}
    for way, (parallel, kinds) in SPLIT.items()
    for kind in kinds
]

ROUNDED = [{"name": f"{k}-bf16", "kind": k, "dtype": "bfloat16", "gradients": False} for k in ("mixtral", *LATENT)]
REFUSALS = [{"name": kind, "kind": kind} for kind in REFUSED]
# What is disabled (functions that correct the bridge), the model that then goes wrong, and how it is loaded.
WRONG: list[dict[str, Any]] = [
    {"name": "window", "disable": ["bridge_fixes.correct_window"], "kind": "mistral"},
    {"name": "window-forgotten", "disable": ["bridge_fixes.correct_window"], "kind": "qwen2-window"},
    {"name": "router", "disable": ["bridge_fixes.correct_router"], "kind": "qwen3-moe"},
    {"name": "llama3-scaling", "disable": ["bridge_fixes.check_rope"], "kind": "llama"},
    {"name": "llama3-scaling-bf16", "disable": ["bridge_fixes.check_rope"], "kind": "llama", "dtype": "bfloat16"},
    {
        "name": "latent",
        "disable": ["bridge_fixes.check_rope", "bridge_fixes.correct_latent_attention"],
        "kind": "deepseek-v3-rope",
    },
    {"name": "rope-base", "disable": ["bridge_fixes.check_rope", "hf_folder.give_rope_theta"], "kind": "qwen3"},
]
WRONG_TWO: list[dict[str, Any]] = [
    WRONG[0] | {"name": "window-tp2", "parallel": {"tensor": 2}},
    WRONG[0] | {"name": "window-cp2", "parallel": {"context": 2}},
    WRONG[3] | {"name": "llama3-scaling-pp2", "parallel": {"pipeline": 2}},
    WRONG[2] | {"name": "router-ep2", "parallel": {"expert": 2}},
    WRONG[-1] | {"name": "rope-base-dp2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, what Hugging Face makes of them, and what every layout makes of them."""
    place = tmp_path_factory.mktemp("architectures")
    for name in ("models", "saved", "gradients"):
        (place / name).mkdir()
    models = [{"kind": kind} for kind in DENSE + MOE] + [{"kind": kind, "refused": True} for kind in REFUSED]
    worlds = [
        group(1, "model", models),
        group(1, "load", ONE + ROUNDED),
        group(2, "load", TWO),
        group(1, "refused", WRONG + REFUSALS),
        group(2, "refused", WRONG_TWO),
    ]
    fork_rig.run("architecture_workers", place, worlds)
    return place


def of_ranks(folder: Path, spec: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [load_file(file) for file in sorted((folder / spec["name"]).glob("*.safetensors"))]


def reference(folder: Path, spec: dict[str, Any]) -> dict[str, Tensor]:
    return load_file(folder / f"reference-{spec['kind']}.safetensors")


layouts = pytest.mark.parametrize("spec", ONE + TWO, ids=[s["name"] for s in ONE + TWO])


@layouts
def test_every_tensor_of_the_folder_comes_back_bitwise_on_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    source = load_file(folder / "models" / spec["kind"] / "model.safetensors")
    for tensors in of_ranks(folder, spec):
        weights = section(tensors, "weight")
        assert weights.keys() == source.keys()
        for name, tensor in source.items():
            assert torch.equal(weights[name], tensor), name


@layouts
def test_logprobs_of_packed_documents_equal_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    expected = section(reference(folder, spec), "logprobs")
    found = {k: v for tensors in of_ranks(folder, spec) for k, v in section(tensors, "logprobs").items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=2e-5)


@layouts
def test_every_gradient_equals_autograd(folder: Path, spec: dict[str, Any]) -> None:
    expected, exported = section(reference(folder, spec), "gradient"), section(of_ranks(folder, spec)[0], "gradient")
    found = {name: g for name, g in exported.items() if not name.endswith("e_score_correction_bias")}  # a buffer
    assert found.keys() == expected.keys()
    unit = torch.tensor(1.0)  # an expert that no token chose has no gradient
    errors = {n: ((found[n] - g).norm() / (g.norm() if g.any() else unit)).item() for n, g in expected.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@layouts
def test_transformers_loads_the_saved_folder_with_the_same_weights(folder: Path, spec: dict[str, Any]) -> None:
    saved, source = folder / "saved" / spec["name"], folder / "models" / spec["kind"]
    assert {f.name for f in saved.iterdir()} == {f.name for f in source.iterdir()}
    loaded, details = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(details.values()), details
    original = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, original[name]), name


@pytest.mark.parametrize("spec", ROUNDED, ids=[s["name"] for s in ROUNDED])
def test_bfloat16_rounds_the_weights_once_and_leaves_what_routers_select_by(folder: Path, spec: dict[str, Any]) -> None:
    source = load_file(folder / "models" / spec["kind"] / "model.safetensors")
    weights = section(of_ranks(folder, spec)[0], "weight")
    assert weights.keys() == source.keys()
    for name, tensor in source.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert weights[name].dtype == dtype, name
        assert torch.equal(weights[name], tensor.to(dtype)), name


@pytest.mark.parametrize("spec", WRONG + WRONG_TWO, ids=[s["name"] for s in WRONG + WRONG_TWO])
def test_the_forward_check_refuses_a_wrong_translation_on_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    source = folder / "models" / spec["kind"]
    architecture = json.loads((source / "config.json").read_text())["architectures"][0]
    ranks = fork_rig.Outcome(folder / "refused" / spec["name"]).ranks
    assert len(ranks) == (2 if spec in WRONG_TWO else 1)
    for said in ranks:
        for what, named in (("whole", "a miniature of it"), ("weights", "it")):
            assert said[what].startswith(f"model.path: {source}: Megatron computes {architecture} otherwise")
            assert f"Log-probabilities of {named} differ by" in said[what]
            assert "model.verify: false" in said[what]
        assert said["unverified"] is None


@pytest.mark.parametrize("kind", REFUSED)
def test_what_megatron_cannot_do_is_refused_with_its_reason(folder: Path, kind: str) -> None:
    (said,) = fork_rig.Outcome(folder / "refused" / kind).ranks
    assert said["whole"].startswith(f"model.path: {folder / 'models' / kind}")
    assert re.search(REFUSED[kind][1], said["whole"])
