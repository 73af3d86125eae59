"""Model folders and layouts that cannot work are refused with the key and the number that do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.schema import ParallelConfig
from common.errors import UsageError
from learner.megatron.conversion.hf_folder import check_layout, give_rope_theta, read_config


def model(**changes: Any) -> SimpleNamespace:
    sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 128, "num_hidden_layers": 6}
    return SimpleNamespace(**(sizes | changes))


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        ({"tensor": 8}, 8, "learner.parallel.tensor: expected a divisor of the model's 12 attention heads, found 8"),
        ({"tensor": 2, "pipeline": 2}, 6, "learner.world_size: expected a multiple of 4"),
        ({"expert": 2}, 2, "learner.parallel.expert: expected 1, since the model has no experts, found 2"),
    ],
)
def test_a_layout_that_does_not_fit_names_its_key(layout: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_layout(model(), ParallelConfig(**layout), world_size)
    assert message in str(caught.value)


def test_a_layout_that_fits_is_accepted() -> None:
    check_layout(model(), ParallelConfig(tensor=2, pipeline=3, virtual_pipeline=2), 12)


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
