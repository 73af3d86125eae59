"""A whole job that learns from a teacher alone, which vLLM serves: its figures are those of Hugging Face's models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from launch.quickstart.assets import PRESETS, build_model
from launch.quickstart.init import write_example
from tests.rigs.jobs import at_work, metrics
from tests.rigs.processes import Command, until
from tests.rigs.redis_servers import free_port
from tests.rigs.waiting import read_jsonl

STEPS = 3
TOP_K = 4


def write(folder: Path) -> Path:
    """The example's job with another random model as its teacher."""
    write_example(folder)
    build_model(PRESETS["tiny"].model, 2, folder / "teacher")
    document = yaml.safe_load((folder / "config.yaml").read_text())
    document["run"]["steps"] = STEPS
    document["telemetry"] = {"transcripts": 1}
    document["learner"]["groups_per_step"] = 4
    told = {"teacher": "teacher", "objective": "forward_kl", "top_k": TOP_K, "alone": True}
    document["learner"]["loss"] = {"distillation": told}
    serve = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    teacher = {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "big", "kind": "teacher"}
    document["scorers"] = {"teacher": {**teacher, "serve": {**serve, "model": str(folder / "teacher")}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    return folder / "config.yaml"


@torch.no_grad()
def expected(folder: Path, lines: list[dict[str, Any]]) -> tuple[float, float, float]:
    """(mean log-ratio of sampled tokens, mean tail of the teacher, mean forward divergence) of these transcripts."""
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder / name).float() for name in ("model", "teacher")]
    gaps, tails, divergences = [], [], []
    for line in lines:
        tokens = [token for turn in line["turns"] for token in turn["tokens"]]
        mask = [turn["author"] == "policy" for turn in line["turns"] for _ in turn["tokens"]]
        ids = torch.tensor([tokens])
        policy, teacher = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in models)
        trained = torch.tensor(mask[1:])
        policy, teacher = policy[trained], teacher[trained]
        targets = ids[0, 1:][trained][:, None]
        gaps.append((policy - teacher).gather(1, targets))
        top, where = teacher.topk(TOP_K, -1)
        mine = policy.gather(1, where)
        tail, own = 1 - top.exp().sum(1), 1 - mine.exp().sum(1)
        divergences.append((top.exp() * (top - mine)).sum(1) + tail * (tail.log() - own.log()))
        tails.append(tail)
    return tuple(torch.cat(each).mean().item() for each in (gaps, tails, divergences))


@pytest.mark.slow
def test_a_job_learns_from_a_served_teacher_what_hugging_face_computes_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    config = write(folder)
    monkeypatch.chdir(folder)
    with Command(tmp_path, "teacher", "scorer", str(config), "teacher", "run.dir=teacher-run") as role:
        until("the teacher", lambda: "is served" in role.output(), role)
        with at_work(config):
            pass
    run = folder / "run"
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(STEPS))
    kept = [line for path in (run / "transcripts").glob("*.jsonl") for line in read_jsonl(path)]
    assert len(kept) == sum(line["samples"] for line in lines)
    assert all(line["error"] is None and line["notes"]["teacher"].startswith("big") for line in kept)
    assert all(line["advantage"] == 0 for line in kept), "rewards train nothing"
    gap, tail, divergence = expected(folder, [line for line in kept if line["step"] == 0])
    first = lines[0]
    assert first["teacher_kl_mean"] == pytest.approx(gap, abs=1e-4)
    assert first["teacher_tail_mean"] == pytest.approx(tail, abs=1e-5)
    assert first["loss"] == pytest.approx(divergence, abs=1e-4)
    assert divergence > 0.01, "else there would be nothing to learn"
    assert all(line["teacher_s"] > 0 and line["grad_norm"] > 0 for line in lines)
