"""The planner's parameters against transformers' own models, built on the meta device."""

import json
import re
from math import prod
from pathlib import Path

import pytest

from common.config.architecture import KIND_OF, READERS, UnknownArchitecture, read_architecture
from launch.plan.layout import count, count_active, hf_tensors
from tests.rigs.configs import MODELS, architecture

PUBLISHED = {  # billions of parameters, active ones as the model cards and reports state them
    "Qwen3-0.6B": (0.596, 0.596),
    "Qwen3-1.7B": (1.721, 1.721),
    "Qwen3-4B": (4.022, 4.022),
    "Qwen3-8B": (8.191, 8.191),
    "Llama-3.1-70B": (70.55, 70.55),
    "Llama-3.1-405B": (405.85, 405.85),
    "DeepSeek-V3": (671.03, 37),
    "Qwen3-235B-A22B": (235.09, 22),
    "Qwen3-30B-A3B": (30.53, 3.3),
    "Mixtral-8x7B-v0.1": (46.70, 12.9),
}
QWEN2 = dict(model_type="qwen2", hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
QWEN2 |= dict(num_key_value_heads=2, vocab_size=128, tie_word_embeddings=True, max_position_embeddings=512)
OTHERS = {  # features that none of the folders has
    "qwen2": QWEN2,
    "mistral": {**QWEN2, "model_type": "mistral", "head_dim": 32, "tie_word_embeddings": False},
    "llama-biased": {**QWEN2, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3-moe-every-second": {
        **QWEN2,
        **dict(model_type="qwen3_moe", head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        **dict(decoder_sparse_step=2, mlp_only_layers=[0], num_hidden_layers=4),
    },
    "glm4-moe": {
        **QWEN2,
        **dict(model_type="glm4_moe", head_dim=32, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2),
        **dict(moe_intermediate_size=48, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True),
    },
}


def hugging_face_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a model that is never allocated; experts, which transformers 5 fuses, under their names in files."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in built.named_parameters():
        shape = tuple(parameter.shape)
        prefix, _, last = name.rpartition(".")
        if not prefix.endswith(".experts"):
            shapes[name] = shape
        elif last == "gate_up_proj":
            half = (shape[1] // 2, shape[2])
            shapes |= {
                f"{prefix}.{n}.{part}.weight": half for n in range(shape[0]) for part in ("gate_proj", "up_proj")
            }
        else:
            shapes |= {f"{prefix}.{n}.down_proj.weight": shape[1:] for n in range(shape[0])}
    return shapes


def in_files(name: str) -> str:
    """Mixtral's files name what transformers 5 renames while loading."""
    name = name.replace("block_sparse_moe", "mlp")
    for theirs, ours in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
        name = re.sub(rf"\.{theirs}\.weight$", f".{ours}.weight", name)
    return name


@pytest.mark.parametrize("name", [*PUBLISHED, *OTHERS])
@pytest.mark.slow
def test_every_parameter_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = MODELS / name
    if name in OTHERS:
        folder = tmp_path
        (folder / "config.json").write_text(json.dumps(OTHERS[name]))
    ours = read_architecture(json.loads((folder / "config.json").read_text()))
    expected = hugging_face_shapes(folder)
    assert {in_files(name): shape for name, shape in hf_tensors(ours)} == expected
    assert count(ours) == sum(map(prod, expected.values()))


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir() if path.is_dir()))
def test_totals_are_the_published_ones(name: str) -> None:
    total, active = PUBLISHED[name]
    assert count(architecture(name)) / 1e9 == pytest.approx(total, abs=0.006)
    assert count_active(architecture(name)) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.slow
def test_every_architecture_that_the_learner_supports_is_counted() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    assert {kind for kind, model in names.items() if model in KIND_OF} <= set(READERS)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model_type", "gpt2", r"'gpt2'.*qwen3_moe"),
        ("hidden_size", None, "hidden_size is None"),
        ("hidden_size", True, "hidden_size is True"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_key_value_heads", 0, "num_key_value_heads is 0"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is 0"),
    ],
)
def test_an_architecture_that_cannot_be_counted_says_why(name: str, value: object, said: str) -> None:
    document = OTHERS["qwen3-moe-every-second"]
    assert read_architecture({**document, "head_dim": None}).kind == "qwen3_moe", "null stands for the default"
    with pytest.raises(UnknownArchitecture, match=said):
        read_architecture({**document, name: value})
