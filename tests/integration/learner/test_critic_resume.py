"""Real learners with a critic, killed with -9 in its first steps alone and later, resume bitwise; what they write."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.rigs.jobs import STEPS, Job, assert_delivered_once, warm

ALONE = 2
LEARNER: dict[str, Any] = {
    "loss": {"advantage": "gae"},
    "minibatches": 2,
    "critic": {"warmup_steps": ALONE, "value_clip": 0.2, "lam": 0.95, "optimizer": {"lr": 1e-3}},
}


def critic_of(job: Job) -> str:
    return hashlib.sha256((job.run.critic / "model.safetensors").read_bytes()).hexdigest()


def figures(job: Job) -> list[tuple[float, ...]]:
    return [(x.loss, x.grad_norm, x.value_loss, x.value_grad_norm, x.value_explained) for x in job.lines()]


def test_a_learner_with_a_critic_killed_with_9_ends_bitwise_as_if_it_was_not(tmp_path: Path, model: Path) -> None:
    whole = Job(tmp_path / "whole", model, LEARNER)
    with whole.served():
        whole.finish()
    job = Job(tmp_path / "job", model, LEARNER, checkpoint={"every": 1, "keep": 1})
    with job.served() as client:
        for steps in (1, 4):
            job.start()
            job.until(lambda steps=steps: len(job.lines()) >= steps)
            job.kill()
        job.finish()
        assert_delivered_once(client.ledger())
        assert client.status().learner.incarnation == 2
    job.assert_every_step_once()
    assert job.weights() == whole.weights()
    assert critic_of(job) == critic_of(whole)
    assert figures(job) == figures(whole)
    lines = whole.lines()
    assert [line.grad_norm > 0 for line in lines] == [step >= ALONE for step in range(STEPS)]
    assert all(line.value_grad_norm > 0 and line.tokens_trained for line in lines)
    assert lines[0].value_explained == 0.0, "its first values are zero"
    assert lines[-1].value_loss < lines[0].value_loss
    loaded = AutoModelForSequenceClassification.from_pretrained(whole.run.critic)
    assert loaded.config.num_labels == 1 and loaded.score.weight.any()
    newest = max(int(path.name.removeprefix("step-")) for path in whole.run.checkpoints.glob("step-*"))
    warm("export", str(whole.run.path), str(tmp_path / "exported"), "--critic", "--step", str(newest))
    exported, final = (load_file(path / "model.safetensors") for path in (tmp_path / "exported", whole.run.critic))
    assert newest == STEPS and exported.keys() == final.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in final.items())
