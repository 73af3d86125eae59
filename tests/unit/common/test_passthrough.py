"""Options for vLLM and Megatron: names that Slipstream sets, or that they do not have, are refused."""

import ast
from pathlib import Path

import msgspec
import pytest

from common.config.checks import problems
from common.config.passthrough import TAKEN, known_names, passthrough_warnings
from common.config.schema import Config, EngineConfig, LearnerConfig, MegatronConfig, RolloutConfig
from tests.rigs.configs import config_of
from tests.rigs.processes import ROOT


def passing(folder: Path, engine: dict[str, object], megatron: dict[str, object]) -> Config:
    return msgspec.structs.replace(
        config_of(folder / "run"),
        rollout=RolloutConfig(engine=EngineConfig(extra=engine)),
        learner=LearnerConfig(megatron=MegatronConfig(extra=megatron)),
    )


def refusals(config: Config) -> list[str]:
    return [str(problem) for problem in problems(config, "broker") if ".extra." in problem.key]


def test_names_of_the_libraries_pass_with_a_warning(tmp_path: Path) -> None:
    config = passing(tmp_path, {"stream_interval": 4, "kernel_config": {}}, {"bucket_size": 9, "decoupled_lr": 1})
    assert refusals(config) == []
    megatron, engine = passthrough_warnings(config)
    assert "bucket_size, decoupled_lr" in megatron and "stream_interval" in engine


@pytest.mark.parametrize(
    ("engine", "megatron", "said"),
    [
        (
            {"attention_backnd": 1},
            {},
            "extra.attention_backnd: expected an option of vllm, found unknown",
        ),
        ({"attention_backnd": 1}, {}, "did you mean 'attention_backend'?"),
        ({}, {"bucket_sise": 1}, "did you mean 'bucket_size'?"),
        ({}, {"gated_linear_unit_": 1}, "did you mean 'gated_linear_unit'?"),
        ({"tensor_parallel_size": 2}, {}, "use rollout.engine.tensor_parallel instead"),
        ({"data_parallel_size": 2}, {}, "use rollout.nodes (a node is an engine;"),
        ({"load_format": "auto"}, {}, "Slipstream relies on the value that it sets"),
        ({}, {"overlap_grad_reduce": False}, "use learner.overlap instead"),
        ({"quantization": "fp8"}, {}, "use rollout.engine.quantization instead"),
        ({"quantization_config": {"linear": "mxfp8"}}, {}, "use rollout.engine.quantization instead"),
        ({"speculative_config": {"method": "ngram"}}, {}, "extra.speculative_config: expected an engine without"),
        ({"spec_method": "ngram"}, {}, "temperatures above 0"),
        ({}, {"fp8": "hybrid"}, "extra.fp8: expected training in bfloat16 or float32, found 'fp8'; FP8 training is"),
        ({}, {"fp8_param_gather": True}, "FP8 training is refused"),
        ({}, {"fp4": "e2m1"}, "FP8 training is refused"),
        ({}, {"fp16": True}, "float16 training is refused"),
        ({}, {"bf16": False}, "use model.dtype instead"),
    ],
)
def test_other_names_are_refused_with_what_to_write_instead(tmp_path: Path, engine, megatron, said) -> None:
    (refusal,) = refusals(passing(tmp_path, engine, megatron))
    assert said in refusal


def test_where_a_library_is_not_installed_only_its_own_role_can_tell(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("common.config.passthrough.find_spec", lambda name: None)
    assert refusals(passing(tmp_path, {"attention_backnd": 1}, {"bucket_sise": 1})) == []
    assert len(refusals(passing(tmp_path, {"seed": 1}, {"lr": 1.0}))) == 2


@pytest.mark.parametrize("package", ["vllm", "megatron"])
def test_every_refused_name_is_one_of_the_library(package: str) -> None:
    assert TAKEN[package].keys() <= known_names(package)


def test_every_option_that_the_code_sets_is_refused() -> None:
    def strings(file: str, name: str) -> set[str]:
        """Keys of dictionaries and keywords of calls in a function or class, and attributes that it sets."""
        nodes = [n for n in ast.walk(ast.parse((ROOT / file).read_text())) if getattr(n, "name", "") == name]
        found: set[str] = set()
        for node in ast.walk(nodes[0]):
            if isinstance(node, ast.Dict):
                found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
        return found & known_names("vllm" if "engine" in file else "megatron")

    set_by_engine = strings("rollout_fleet/engine/engine.py", "_arguments")
    assert set_by_engine and set_by_engine <= TAKEN["vllm"].keys()
    model, moe = "learner/megatron/conversion/model.py", "learner/megatron/moe.py"
    optimizer = "learner/megatron/optimizer.py"
    parts = [(model, "_configure"), (moe, "configure"), (optimizer, "wrap_chunks"), (optimizer, "Optimizer")]
    for file, name in parts:
        found = strings(file, name)
        assert found and found <= TAKEN["megatron"].keys(), (file, found - TAKEN["megatron"].keys())
