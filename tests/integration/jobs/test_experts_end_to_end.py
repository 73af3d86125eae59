"""A mixture of experts learns with its engine's routing: a whole job, and its first step again without the routing."""

from pathlib import Path

import transformers

from tests.rigs import tiny_models
from tests.rigs.jobs import at_work, make_assets, metrics, warm, write_config

STEPS = 2


def moe_assets(folder: Path) -> Path:
    """The quickstart's tokenizer and problems with a tiny Qwen3-MoE in the place of the dense model."""
    make_assets(folder)
    dense = transformers.AutoConfig.from_pretrained(folder / "model")
    tokens = {name: getattr(dense, name) for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")}
    sizes = dict(head_dim=32, num_experts=16, moe_intermediate_size=64, norm_topk_prob=True, initializer_range=0.15)
    tiny_models.new_model("moe", 1, **sizes, **tokens).bfloat16().save_pretrained(folder / "model")
    return folder


def test_replay_brings_learner_and_engine_closer(tmp_path: Path) -> None:
    """In bfloat16 the two sides' arithmetic differs in every layer, so routers disagree here and there."""
    run_dir = tmp_path / "run"
    config = write_config(
        tmp_path / "job.yaml",
        moe_assets(tmp_path / "assets"),
        run_dir,
        STEPS,
        model={"dtype": "bfloat16"},
        learner={"moe": {"replay_routing": True}, "optimizer": {"lr": 1e-3}},
        rollout={"group_size": 8, "max_tokens": 24},
        staleness={"max": 0},
        weights={"canary_tolerance": 3.0},
    )
    with at_work(config):
        pass
    replayed = metrics(run_dir)
    assert len(replayed) == STEPS
    assert all(line["grad_norm"] > 0 for line in replayed)
    warm("replay", str(run_dir), "--out", str(tmp_path / "free"), "learner.moe.replay_routing=false")
    free = metrics(tmp_path / "free")
    assert all(line["routing_mismatch_fraction"] == 0.0 for line in free)
    assert 0 < replayed[0]["routing_mismatch_fraction"] < 0.2
    print([(line["mismatch_abs_mean"], line["routing_mismatch_fraction"]) for line in (replayed[0], free[0])])
    assert replayed[0]["mismatch_abs_mean"] < free[0]["mismatch_abs_mean"]  # same weights and tokens
