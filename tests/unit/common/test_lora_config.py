"""Refusals of learner.lora, with their reasons."""

import json
from pathlib import Path

import pytest

from common.config.architecture import Architecture, read_architecture
from common.config.checks import problems
from common.config.loading import load_either
from common.config.lora import PROJECTIONS
from common.config.lora_checks import lora_problems
from tests.rigs.processes import ROOT

RL, SFT = (ROOT / "configs" / f"{name}.yaml" for name in ("quickstart", "quickstart-sft"))


def shape(name: str) -> Architecture:
    return read_architecture(json.loads((ROOT / "configs" / "models" / name / "config.json").read_text()))


def refused(words: list[str], file: Path = RL, model: str = "Qwen3-0.6B") -> list[str]:
    config = load_either(file, [word if word.startswith("learner.") else f"learner.lora.{word}" for word in words])
    return [f"{p.key}: {p.expected} / {p.found} / {p.hint}" for p in lora_problems(config, shape(model))]


def test_what_fits_is_not_refused() -> None:
    assert refused([]) == [] == refused(["rank=8"]) == refused(["rank=8", "dropout=0.1"], SFT)
    assert refused(["rank=6", "learner.parallel.tensor=2", "targets=[linear_proj]"]) == []
    assert refused(["rank=8", "targets=[linear_qkv, linear_proj]"], model="Qwen3-235B-A22B") == []
    config = load_either(RL, ["learner.lora.rank=8"])
    assert config.learner.lora is not None
    assert (config.learner.lora.factor, config.learner.lora.targets) == (16.0, [*PROJECTIONS])


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["rank=7", "learner.parallel.tensor=2"], ("learner.lora.rank", "multiple", "(2)")),
        (["rank=8", "targets=[q_proj]"], ("learner.lora.targets", "q_proj", "part of 'linear_qkv'")),
        (["rank=8", "targets=[linear_fc3]"], ("learner.lora.targets", "did you mean 'linear_fc2'?")),
        (["rank=8", "targets=['*.layers.0.*']"], ("learner.lora.targets", "docs/lora.md")),
        (["rank=8", "targets=[]"], ("learner.lora.targets", "one or more", "none")),
        (["rank=8", "targets=[linear_fc1, linear_fc1]"], ("learner.lora.targets", "each once")),
        (["rank=8", "dropout=0.1"], ("learner.lora.dropout", "0 in an RL job", "different features")),
        (["rank=8", "learner.moe.balance=aux_loss"], ("learner.moe.balance", "none with learner.lora", "stay")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(words: list[str], facts: tuple[str, ...]) -> None:
    (found,) = refused(words)
    for fact in facts:
        assert fact in found, found


def test_adapters_travel_only_where_some_train() -> None:
    config = load_either(RL, ["weights.encoding=adapter"])
    (problem,) = lora_problems(config, shape("Qwen3-0.6B"))
    assert (problem.key, problem.found) == ("weights.encoding", "adapter") and "learner.lora" in problem.expected
    assert not [*lora_problems(load_either(RL, ["weights.encoding=adapter", "learner.lora.rank=8"]), None)]


def test_dropout_needs_whole_layers() -> None:
    (found,) = refused(["rank=8", "dropout=0.1", "learner.parallel.tensor=2"], SFT)
    assert "learner.lora.dropout" in found and "learner.parallel.tensor > 1" in found


@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("Mixtral-8x7B-v0.1", ("learner.lora.targets", "linear_fc1, linear_fc2", "experts have no adapters")),
        ("DeepSeek-V3", ("learner.lora", "latent attention")),
    ],
)
def test_experts_and_latent_attention_have_no_adapters(model: str, facts: tuple[str, ...]) -> None:
    (found,) = refused(["rank=8"], model=model)
    for fact in facts:
        assert fact in found, found


def test_the_checks_of_a_config_ask() -> None:
    config = load_either(RL, ["learner.lora.rank=8", "learner.lora.dropout=0.5"])
    (found,) = [problem for problem in problems(config) if problem.key.startswith("learner.lora")]
    assert found.found == "0.5 (number)"
