"""A mixture of experts learns with its engine's routing: whole jobs, with replay and without."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.integration.job_rig import Command, make_assets, metrics, write_config

STEPS = 4


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tokenizer and problems with a tiny Qwen3-MoE in the place of the dense model."""
    folder = make_assets(tmp_path_factory.mktemp("assets") / "assets")
    dense = transformers.AutoConfig.from_pretrained(folder / "model")
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.15,
        num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        eos_token_id=dense.eos_token_id, pad_token_id=dense.pad_token_id, bos_token_id=dense.bos_token_id,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    return folder


def job(folder: Path, assets: Path, replay: bool) -> list[dict[str, Any]]:
    """The metrics of a short bfloat16 job, in which the two sides' arithmetic differs in every layer."""
    run_dir = folder / "run"
    config = write_config(
        folder / "job.yaml",
        assets,
        run_dir,
        STEPS,
        model={"dtype": "bfloat16"},
        learner={"moe": {"replay_routing": replay}, "optimizer": {"lr": 1e-3}},
        rollout={"group_size": 8, "max_tokens": 24},
        staleness={"max": 0},
        weights={"canary_tolerance": 3.0},
    )
    with Command(folder, "up", "up", str(config)) as up:
        assert up.wait() == 0, up.output()
    return metrics(run_dir)


def mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def test_replay_brings_learner_and_engine_closer(assets: Path, tmp_path: Path) -> None:
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    replayed, free = job(tmp_path / "with", assets, True), job(tmp_path / "without", assets, False)
    assert len(replayed) == len(free) == STEPS
    assert all(line["grad_norm"] > 0 for line in replayed)
    assert all(line["routing_mismatch_fraction"] == 0.0 for line in free)
    # the routers disagree here and there, which is what replay undoes
    assert 0 < mean(replayed, "routing_mismatch_fraction") < 0.2
    print({n: (mean(replayed, n), mean(free, n)) for n in ("mismatch_abs_mean", "routing_mismatch_fraction", "step_s")})
    assert mean(replayed, "mismatch_abs_mean") < mean(free, "mismatch_abs_mean")
