from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config.supported_models import SUPPORTED
from common.errors import UsageError
from learner.megatron.conversion.architectures import check_architecture, check_names

FOLDER = Path("/models/some")


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
