"""Model folders and layouts that cannot work are refused with the key and the number that do not fit."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.schema import ParallelConfig
from common.config.supported_models import SUPPORTED
from common.errors import UsageError
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.hf_folder import (
    check_architecture,
    check_layout,
    check_names,
    give_rope_theta,
    new_folder,
    read_config,
)

FOLDER = Path("/models/some")


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
    with pytest.raises(UsageError, match=r"config\.json: .* valid JSON"):
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


def test_an_unknown_architecture_is_refused_with_the_list_of_supported_ones() -> None:
    with pytest.raises(UsageError, match="found Gemma2ForCausalLM in") as caught:
        check_architecture(FOLDER, SimpleNamespace(architectures=["Gemma2ForCausalLM"]))
    assert all(name in str(caught.value) for name in SUPPORTED)


def test_a_supported_architecture_passes() -> None:
    for name in SUPPORTED:
        check_architecture(FOLDER, SimpleNamespace(architectures=[name], quantization_config=None))


def test_quantised_weights_are_refused() -> None:
    config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], quantization_config={"quant_method": "fp8"})
    with pytest.raises(UsageError, match="found quantised ones"):
        check_architecture(FOLDER, config)


def test_a_tensor_that_no_mapping_takes_is_refused_by_name() -> None:
    names = ["model.norm.weight", "model.layers.0.self_attn.o_proj.bias"]
    with pytest.raises(UsageError, match=r"no place for model\.layers\.0\.self_attn\.o_proj\.bias \(1 tensors"):
        check_names(FOLDER, names, ["model.norm.weight"], layers=1)


def test_further_prediction_layers_and_rotary_tables_are_no_loss() -> None:
    names = ["model.layers.2.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
    check_names(FOLDER, names, [], layers=2)
    with pytest.raises(UsageError):
        check_names(FOLDER, names, [], layers=3)


def test_a_new_folder_appears_when_it_is_complete_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(hf_folder, "sync", lambda path: synced.append(path.name))
    target = tmp_path / "model"
    with new_folder(target) as staging:
        for name in ("a", "b"):
            (staging / name).write_bytes(b"new")
        assert not target.exists()
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {"a": b"new", "b": b"new"}
    assert synced == ["a", "b", staging.name, tmp_path.name]
    assert not staging.exists()


def test_a_new_folder_takes_the_place_of_the_old_one_and_of_what_an_interrupted_write_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as staging:
        (staging / "weights").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), new_folder(target) as staging:
        (staging / "half").write_bytes(b"written")
        raise KeyboardInterrupt
    assert (target / "weights").read_bytes() == b"old"
    with new_folder(target) as staging:
        (staging / "weights").write_bytes(b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert [file.read_bytes() for file in target.iterdir()] == [b"new"]
