"""Refusals of learner.critic, with their reasons."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.config.architecture import Architecture, read_architecture
from common.config.checks import problems, resolve_paths
from common.config.critic import CriticConfig
from common.config.critic_checks import SCORE, critic_problems
from common.config.loading import load_either
from common.config.schema import Config
from common.errors import ConfigError
from tests.rigs.processes import ROOT

JOB = ROOT / "configs" / "quickstart.yaml"
GAE = ["learner.loss.advantage=gae", "learner.critic={}"]


def shape(name: str) -> Architecture:
    return read_architecture(json.loads((ROOT / "configs" / "models" / name / "config.json").read_text()))


def load(words: list[str]) -> Config:
    config = load_either(JOB, words)
    assert isinstance(config, Config)
    return config


def refused(words: list[str], model: str = "Qwen3-0.6B") -> list[str]:
    return [f"{p.key}: {p.expected} / {p.found} / {p.hint}" for p in critic_problems(load(words), shape(model))]


def test_what_fits_is_not_refused() -> None:
    assert refused([]) == [] == refused(GAE)
    assert refused([*GAE, "learner.critic.value_clip=0.2", "learner.epochs=2"]) == []
    assert refused([*GAE, "learner.critic.lam=length", "learner.critic.warmup_steps=5"]) == []
    assert load([]).learner.value_model is None
    assert load(GAE).learner.value_model == CriticConfig()
    changed = load([*GAE, "learner.critic.optimizer.warmup_steps=5"]).learner.value_model
    assert changed is not None and changed.optimizer.lr == 1e-5, "the others keep a critic's defaults"
    assert not load(GAE).measures_kl and load([*GAE, "learner.critic.kl_coefficient=0.1"]).measures_kl


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["learner.loss.advantage=gae"], ("learner.loss.advantage", "gae", "values come from a critic")),
        (["learner.critic={}"], ("learner.loss.advantage", "gae with learner.critic", "/ grpo /")),
        ([*GAE, "learner.critic.value_clip=0.2"], ("learner.critic.value_clip", "unset with one update")),
        ([*GAE, "learner.critic.lam=length", "learner.critic.level=turn"], ("learner.critic.lam", "tokens", "turns")),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], facts: tuple[str, ...]) -> None:
    (said,) = refused(words)
    for fact in facts:
        assert fact in said, said


def test_a_model_with_experts_is_refused() -> None:
    (said,) = refused(GAE, model="Qwen3-235B-A22B")
    assert "learner.critic" in said and "experts" in said


def test_other_checks_know_that_values_compare_samples() -> None:
    every = [*GAE, "learner.dynamic_sampling=true"]
    assert "learner.dynamic_sampling" in {problem.key for problem in problems(load(every), "node")}
    alone = [*GAE, "rollout.group_size=1"]
    assert "rollout.group_size" not in {problem.key for problem in problems(load(alone), "node")}


@pytest.mark.parametrize("word", ["lam=1.5", "lam=short", "gamma=-0.1", "level=sentence", "optimizer.lr=0", "rate=1"])
def test_values_out_of_range_and_unknown_keys_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"learner\.critic\." + word.partition("=")[0]):
        load([*GAE, f"learner.critic.{word}"])


def test_a_coefficient_of_the_loss_that_no_source_takes_is_refused_also_with_one_of_the_reward() -> None:
    sources = {"sources": {"a": {"dataset": "rows.jsonl", "environment": "addition", "kl_coefficient": 0.0}}}
    words = [*GAE, "learner.critic.kl_coefficient=0.1", "learner.loss.kl_coefficient=0.01"]
    found = [p.key for p in problems(load([*words, f"tasks={json.dumps(sources)}"]))]
    assert "learner.loss.kl_coefficient" in found
    assert "learner.loss.kl_coefficient" not in [p.key for p in problems(load(words))]


def test_the_folder_is_checked_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve_paths(load([*GAE, "learner.critic.path=critic"]))
    folder = tmp_path / "critic"
    assert config.learner.critic is not None and config.learner.critic.path == str(folder)

    def said() -> list[str]:
        return [str(problem) for problem in problems(config) if problem.key == "learner.critic.path"]

    assert "No such file" in said()[0]
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert "without any" in said()[0]
    weights = folder / "model.safetensors"
    weights.touch()
    assert "can be read" in said()[0]
    for header in ("[]", "1", f'{{"{SCORE}": 1}}', f'{{"{SCORE}": {{"shape": ["a"]}}}}'):
        weights.write_bytes(len(header).to_bytes(8, "little") + header.encode())
        assert "can be read" in said()[0], header
    weights.write_bytes((1 << 62).to_bytes(8, "little"))
    assert "can be read" in said()[0]
    save_file({"other.weight": torch.zeros(1, 4)}, weights)
    assert f"without {SCORE}" in said()[0]
    save_file({SCORE: torch.zeros(2, 4)}, weights)
    assert f"{SCORE} has 2" in said()[0]
    save_file({SCORE: torch.zeros(1, 4)}, weights)
    assert said() == []
    for other in ('{"architectures": ["Qwen3ForCausalLM"]}', '{"architectures": {"a": 1}}', "[]"):
        (folder / "config.json").write_text(other)
        assert said(), "another model must be whole"


def test_a_warm_up_as_long_as_the_job_is_refused_but_in_a_replay_which_only_the_learner_reads() -> None:
    job = resolve_paths(load([*GAE, "learner.critic.warmup_steps=4", "run.steps=4", "learner.optimizer.decay_steps=3"]))
    assert "learner.critic.warmup_steps" in {problem.key for problem in problems(job)}
    assert "learner.critic.warmup_steps" not in {problem.key for problem in problems(job, "learner")}


def test_each_schedule_ends_with_the_training_of_its_model() -> None:
    words = [*GAE, "learner.critic.warmup_steps=4", "run.steps=30"]
    for at in ("learner.optimizer", "learner.critic.optimizer"):
        words += [f"{at}.schedule=linear", f"{at}.decay_steps=26", f"{at}.min_lr_fraction=0"]
    job = resolve_paths(load(words))
    found = {problem.key: problem.expected for problem in problems(job) if ".optimizer" in problem.key}
    assert found == {"learner.critic.optimizer.decay_steps": "0, or at least 30, the updates of the run"}
    for reader in ("learner", "node"):  # a replay may end earlier, and a job may run
        assert not [problem for problem in problems(job, reader) if "optimizer" in problem.key]
