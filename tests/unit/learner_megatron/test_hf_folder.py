"""Model folders and layouts that cannot work are refused with the key and the number that do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import ParallelConfig
from common.errors import UsageError
from learner.megatron.hf_folder import check_layout, give_rope_theta, read_config


def model(**changes: Any) -> SimpleNamespace:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 128, "num_hidden_layers": 6}
    return SimpleNamespace(**(sizes | changes))


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        ({"tensor": 8}, 8, "learner.parallel.tensor: 8 does not divide the model's 12 attention heads"),
        ({"tensor": 3}, 3, "learner.parallel.tensor: 3 does not divide the model's 4 key-value heads"),
        ({"pipeline": 4}, 4, "learner.parallel.pipeline: 4 pipeline stages do not divide the model's 6 layers"),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2, "learner.parallel.virtual_pipeline: 4 pipeline stages"),
        ({"virtual_pipeline": 2}, 1, "learner.parallel.virtual_pipeline: needs learner.parallel.pipeline"),
        ({"tensor": 2, "pipeline": 2}, 6, "= 4 does not divide learner.world_size 6"),
        ({"context": 2}, 2, "learner.parallel.context: only 1 is supported yet, found 2"),
        ({"expert_tensor": 2}, 2, "learner.parallel.expert_tensor: only 1 is supported yet, found 2"),
        ({"expert": 2}, 2, "learner.parallel.expert: 2 for a model without experts"),
    ],
)
def test_a_layout_that_does_not_fit_names_its_key(layout: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(model(), ParallelConfig(**layout), world_size)
    assert message in str(caught.value)


def test_a_vocabulary_that_tensor_parallelism_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="2 does not divide the model's 129 vocabulary entries"):
        check_layout(model(vocab_size=129), ParallelConfig(tensor=2), 2)


def test_experts_with_tensor_parallelism_or_an_uneven_split_are_refused() -> None:
    with pytest.raises(UsageError, match=r"learner.parallel.tensor: .* sequence parallelism"):
        check_layout(model(num_experts=8), ParallelConfig(tensor=2), 2)
    with pytest.raises(UsageError, match="3 does not divide the model's 8 experts"):
        check_layout(model(num_experts=8), ParallelConfig(expert=3), 3)


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"tensor": 4}, {"pipeline": 3}, {"pipeline": 3, "virtual_pipeline": 2}]
)
def test_layouts_that_fit_are_accepted(layout: dict[str, int]) -> None:
    check_layout(model(), ParallelConfig(**layout), 12)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model.path: expected a Hugging Face folder, found nothing at .*nowhere"):
        read_config(tmp_path / "nowhere")


def test_a_folder_without_its_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"has no \*.safetensors"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(UsageError, match="names no architectures"):
        read_config(tmp_path)


def test_rope_theta_is_put_where_the_bridge_reads_it() -> None:
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    give_rope_theta(config)
    assert config.rope_theta == 1e6


def test_transformers_4_refuses_scaled_rope_parameters_that_it_would_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    config = SimpleNamespace(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3"})
    with pytest.raises(UsageError, match="rope_parameters of type 'llama3', written by transformers 5"):
        give_rope_theta(config)
