"""Every supported architecture through real Megatron, against plain Hugging Face transformers, in float32."""

import functools
import json
import re
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import CUDA, LOOSE, TF32
from tests.rigs.forked_ranks import Outcome, group, relative, same, section, tried, worst
from tests.rigs.tiny_models import TEMPERATURE, exported, microbatches, policy_loss

SHORT_YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_theta": 1e6, "rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}
# Models that loading refuses, and its message.
REFUSED: dict[str, tuple[tiny_models.Kind, str]] = {
    "llama-attention-bias": (
        ("Llama", dict(attention_bias=True)),
        r"Megatron has no place for model\.layers\.0\.self_attn\.k_proj\.bias, .* \(16 tensors in all\)",
    ),
    "qwen2-yarn": (("Qwen2", dict(rope_parameters=SHORT_YARN)), "rotary embedding of type 'yarn' is not what Megatron"),
    "llama-dynamic": (("Llama", dict(rope_parameters=DYNAMIC)), "rotary embedding of type 'dynamic' is not"),
    "qwen3-moe-dense-layer": (("Qwen3Moe", dict(mlp_only_layers=[0])), "no place for model.layers.0.mlp.down_proj"),
    "deepseek-v3-unnormed": (("DeepseekV3", dict(norm_topk_prob=False)), "norm_topk_prob: false in config.json"),
    "deepseek-v3-halves": (("DeepseekV3", dict(rope_interleave=False)), "rope_interleave: false in config.json"),
    "deepseek-v3-tied": (("DeepseekV3", dict(tie_word_embeddings=True)), "has no weights for output_layer.weight"),
    # transformers ranks groups by their two best experts, Megatron by as many as a group may give
    "deepseek-v3-three-of-a-group": (
        ("DeepseekV3", dict(num_experts_per_tok=6)),
        "Log-probabilities of a miniature of it differ by",
    ),
}

DENSE = ["qwen2", "qwen2.5-untied", "qwen2-window", "tied", "llama", "llama-linear", "llama-tied", "mistral"]
LATENT = ["deepseek-v3", "deepseek-v3-rope", "deepseek-v3-plain"]
DEEP = ["deepseek-v3-deep", "glm-deep"]  # two stages; one has layers with and without experts
MOE = ["mixtral", "mixtral-window", "moe", "normed-window", *LATENT, "glm", *DEEP]
SPLIT = {
    "tp2": ({"tensor": 2}, ["qwen2", "llama", "mistral", "mixtral", "deepseek-v3", "deepseek-v3-plain"]),
    "pp2": ({"pipeline": 2}, ["qwen2-window", "llama-tied", "mixtral", *DEEP]),
    "ep2": ({"expert": 2}, ["mixtral", "normed-window", "deepseek-v3", "glm"]),
    "cp2": ({"context": 2}, ["mistral", "mixtral", "deepseek-v3"]),
}
ONE: list[dict[str, Any]] = [{"name": kind, "kind": kind, "verify": True} for kind in DENSE + MOE if kind not in DEEP]
TWO = tried(
    [
        {"name": f"{kind}-{way}", "kind": kind, "parallel": parallel, "verify": kind == kinds[0]}
        for way, (parallel, kinds) in SPLIT.items()
        for kind in kinds
    ]
)

ROUNDED = [{"name": f"{k}-bf16", "kind": k, "dtype": "bfloat16", "gradients": False} for k in ("mixtral", *LATENT)]
REFUSALS = [{"name": kind, "kind": kind} for kind in REFUSED]
# Disabled functions that correct the bridge, the model that then goes wrong, and how it is loaded.
WRONG: list[dict[str, Any]] = [
    {"name": "window", "disable": ["bridge_fixes.correct_window"], "kind": "mistral"},
    {"name": "window-forgotten", "disable": ["bridge_fixes.correct_window"], "kind": "qwen2-window"},
    {"name": "router", "disable": ["bridge_fixes.correct_router"], "kind": "moe"},
    {"name": "llama3-scaling", "disable": ["bridge_fixes.check_rope"], "kind": "llama"},
    {"name": "llama3-scaling-bf16", "disable": ["bridge_fixes.check_rope"], "kind": "llama", "dtype": "bfloat16"},
    {
        "name": "latent",
        "disable": ["bridge_fixes.check_rope", "bridge_fixes.correct_latent_attention"],
        "kind": "deepseek-v3-rope",
    },
    {"name": "rope-base", "disable": ["bridge_fixes.check_rope", "hf_folder.give_rope_theta"], "kind": "tied"},
]
WRONG_TWO: list[dict[str, Any]] = [
    WRONG[0] | {"name": "window-tp2", "parallel": {"tensor": 2}},
    WRONG[0] | {"name": "window-cp2", "parallel": {"context": 2}},
    WRONG[3] | {"name": "llama3-scaling-pp2", "parallel": {"pipeline": 2}},
    WRONG[2] | {"name": "router-ep2", "parallel": {"expert": 2}},
    WRONG[-1] | {"name": "rope-base-dp2", "ranks": 2},
]


def job_model(folder: Path, spec: dict[str, Any]) -> None:
    """A folder as save_pretrained writes it, and what plain transformers and autograd make of the documents."""
    kind = spec["kind"]
    model = tiny_models.new_model(REFUSED[kind][0] if kind in REFUSED else kind)
    model.save_pretrained(folder / "models" / kind)
    if kind not in REFUSED:
        forked_ranks.write(folder / "reference" / kind, 0, *tiny_models.reference(model))


def job_load(folder: Path, spec: dict[str, Any]) -> None:
    """The model under a layout: exported, its log-probabilities and gradients, saved again."""
    backend = tiny_models.backend(folder, spec)
    tensors = exported(backend, "weight") | tiny_models.logprobs(backend)
    backend.save_hf(folder / "saved" / spec["name"])
    if spec.get("dtype") is None:
        backend.optimizer.zero_grad()
        backend.schedule.train(tiny_models.share(backend, microbatches(0)), policy_loss, TEMPERATURE, entropy=True)
        tensors |= {f"gradient.{n}": t for n, t in tiny_models.gradients(backend).items()}
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, {})


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    """The message of loading, with corrections of the bridge disabled or without."""
    from learner.megatron.conversion import bridge_fixes, hf_folder, verify

    modules = {"bridge_fixes": bridge_fixes, "hf_folder": hf_folder, "verify": verify}
    names = [name.split(".") for name in spec.get("disable", [])]
    with ExitStack() as stack:
        for module, function in names:
            stack.enter_context(patch.object(modules[module], function, nothing))
        result = {"whole": refusal(folder, spec | {"verify": True})}
        if names:
            result["unverified"] = refusal(folder, spec)
            stack.enter_context(patch.object(verify, "check_translation", nothing))
            result["weights"] = refusal(folder, spec | {"verify": True})
    forked_ranks.write(folder / "refused" / spec["name"], torch.distributed.get_rank(), {}, result)


def nothing(*args: Any, **kwargs: Any) -> None: ...


def refusal(folder: Path, spec: dict[str, Any]) -> str:
    from megatron.core import parallel_state

    said = tiny_models.refusal(tiny_models.backend, folder, spec)
    parallel_state.destroy_model_parallel()
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, what Hugging Face makes of them, and what every layout makes of them."""
    return forked_ranks.run(
        tmp_path_factory,
        group(job_model, [{"kind": kind} for kind in [*DENSE, *MOE, *REFUSED]], shared=True),
        group(job_load, ONE + ROUNDED + TWO, shared=True),
        *([] if CUDA else [group(job_refused, WRONG + REFUSALS + WRONG_TWO)]),
    )


layouts = forked_ranks.named(ONE + TWO)
on_the_cpu = pytest.mark.skipif(CUDA, reason="it would find the same there, in a new process for each case")


@layouts
def test_every_tensor_of_the_folder_comes_back_bitwise_on_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    source = load_file(folder / "models" / spec["kind"] / "model.safetensors")
    for tensors in Outcome(folder / spec["name"]).tensors_of:
        same(section(tensors, "weight"), source)


@layouts
def test_logprobs_of_packed_documents_and_every_gradient_equal_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = Outcome(folder / spec["name"]), Outcome(folder / "reference" / spec["kind"])
    routed = TF32 and spec["kind"] in MOE  # it rounds, which sends some tokens to other experts
    logprobs, theirs = found.section("logprobs"), expected.section("logprobs")
    gradients, references = found.section("gradient"), expected.section("gradient")
    assert gradients.keys() == references.keys()
    if routed:
        assert logprobs.keys() == theirs.keys()
        ours, all_of_them = (torch.cat([rows[name] for name in theirs]) for rows in (logprobs, theirs))
        mean = all_of_them.mean()
        assert relative(ours - mean, all_of_them - mean) < 0.5, "in units of what they differ among themselves"
        assert statistics.median(relative(gradients[name], x) for name, x in references.items()) < 0.4
    else:
        same(logprobs, theirs, atol=2e-5 * LOOSE)
        assert worst(gradients, references) < (1e-5 * LOOSE, "")


@layouts
def test_transformers_loads_the_saved_folder_with_the_same_weights(folder: Path, spec: dict[str, Any]) -> None:
    saved, source = folder / "saved" / spec["name"], folder / "models" / spec["kind"]
    assert {f.name for f in saved.iterdir()} == {f.name for f in source.iterdir()}
    loaded, details = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(details.values()), details
    same(loaded.state_dict(), weights_of(source))


@functools.cache
def weights_of(source: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()


@forked_ranks.named(ROUNDED)
def test_bfloat16_rounds_the_weights_once_and_leaves_what_routers_select_by(folder: Path, spec: dict[str, Any]) -> None:
    source = load_file(folder / "models" / spec["kind"] / "model.safetensors")
    kept = "e_score_correction_bias"
    rounded = {name: tensor if name.endswith(kept) else tensor.bfloat16() for name, tensor in source.items()}
    same(Outcome(folder / spec["name"]).section("weight"), rounded)


@on_the_cpu
@forked_ranks.named(WRONG + WRONG_TWO)
def test_the_forward_check_refuses_a_wrong_translation_on_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    source = folder / "models" / spec["kind"]
    architecture = json.loads((source / "config.json").read_text())["architectures"][0]
    ranks = Outcome(folder / "refused" / spec["name"]).ranks
    assert len(ranks) == (2 if spec in WRONG_TWO else 1)
    for said in ranks:
        for what, named in (("whole", "a miniature of it"), ("weights", "it")):
            assert said[what].startswith(f"model.path: {source}: ") and f" {architecture} " in said[what]
            assert f"Log-probabilities of {named} differ by" in said[what]
            assert "model.verify: false" in said[what]
        assert not said["unverified"]


@on_the_cpu
@pytest.mark.parametrize("kind", REFUSED)
def test_what_megatron_cannot_do_is_refused_with_its_reason(folder: Path, kind: str) -> None:
    (said,) = Outcome(folder / "refused" / kind).ranks
    assert said["whole"].startswith(f"model.path: {folder / 'models' / kind}")
    assert re.search(REFUSED[kind][1], said["whole"])
