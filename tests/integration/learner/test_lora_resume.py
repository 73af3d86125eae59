"""Runs that train adapters: killed and resumed bitwise, exported, and refused with other adapters or another base."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch.cli import main
from tests.integration.learner.test_sft_resume import WarmStart, check_equal
from tests.rigs import tiny_models
from tests.rigs.jobs import Job, Run, warm

TOKENS = torch.arange(3, 40)[None]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def check_exports(run: WarmStart, base: Path, folder: Path) -> None:
    """RUN/model and the exported checkpoint compute what the base computes with the exported adapter in peft."""
    from peft import PeftModel

    folder.mkdir()
    warm("export", str(run.run.path), str(folder / "adapter"), "--adapter")
    newest = max(int(path.name.removeprefix("step-")) for path in run.run.checkpoints.glob("step-*"))
    warm("export", str(run.run.path), str(folder / "merged"), "--step", str(newest))
    told = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(base)
    before = AutoModelForCausalLM.from_pretrained(base)
    unchanged = logits(before)
    adapted = PeftModel.from_pretrained(before, str(folder / "adapter")).eval()
    for path in (run.run.model, folder / "merged"):
        torch.testing.assert_close(
            logits(AutoModelForCausalLM.from_pretrained(path)), logits(adapted), rtol=0, atol=1e-5
        )
    assert (logits(adapted) - unchanged).abs().max() > 1e-3
    one, other = (load_file(path / "model.safetensors") for path in (run.run.model, folder / "merged"))
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_a_warm_start_of_adapters_with_dropout_killed_with_9_ends_bitwise_equal(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_models.write_chat_model(model, "tied")
    told = {"lora": {"rank": 8, "dropout": 0.1}, "optimizer": {"lr": 1e-2}}
    whole = WarmStart(tmp_path / "whole", model, {"every": 3}, {"every": 5, "share": 0.3}, **told)
    whole.finish()
    assert whole.lines()[-1].loss < 0.9 * whole.lines()[0].loss
    job = WarmStart(tmp_path / "job", model, {"every": 1, "keep": 1}, {"every": 5, "share": 0.3}, **told)
    for steps in (3, 8):
        job.start()
        job.until(lambda steps=steps: len(job.lines()) >= steps)
        job.kill()
    job.finish()
    check_equal(job, whole)
    check_exports(job, model, tmp_path / "exports")


def change(job: Run, key: str, value: object) -> None:
    """Write another value of a key of the learner into the config."""
    document = yaml.safe_load(job.config.read_text())
    document["learner"][key] = value
    job.config.write_text(yaml.safe_dump(document))


def refused(job: Run) -> str:
    """The log of a learner that ends with exit code 2."""
    log = job.run.logs / "learner-0.log"
    before = len(log.read_text())
    job.finish(code=2)
    return log.read_text()[before:]


def test_an_rl_job_of_adapters_killed_with_9_ends_bitwise_equal_and_refuses_others(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Path(shutil.copytree(model, tmp_path / "base"))
    told = {"lora": {"rank": 4}, "loss": {"kl_coefficient": 0.1}, "optimizer": {"lr": 1e-2}}
    whole = Job(tmp_path / "whole", base, told)
    with whole.served():
        whole.finish()
    job = Job(tmp_path / "job", base, told, checkpoint={"every": 1, "keep": 1})
    document = yaml.safe_load(job.config.read_text())  # how versions travel changes nothing that is trained
    job.config.write_text(yaml.safe_dump(document | {"weights": {"encoding": "adapter"}}))
    with job.served():
        for steps in (2, 5):
            job.start()
            job.until(lambda steps=steps: len(job.lines()) >= steps)
            job.kill()
        job.finish()
        job.assert_every_step_once()
        assert job.weights() == whole.weights()
        job.config.write_text(yaml.safe_dump(document))
        change(job, "lora", {"rank": 8})
        assert "learner.lora.rank was 4 and now is 8" in refused(job)
        change(job, "lora", {"rank": 4})
        weights = load_file(base / "model.safetensors")
        weights["model.embed_tokens.weight"][0, 0] += 1.0
        save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
        assert "is not the model that it was when" in refused(job)
        for state in job.run.checkpoints.glob("step-*/trainer.json"):  # as an earlier release wrote it
            state.write_text(json.dumps(json.loads(state.read_text()) | {"models": {}}))
        assert "model.path: expected the weights beside which" in refused(job)
    change(job, "lora", None)
    job.run.config.write_text(job.config.read_text())
    assert main(["export", str(job.run.path), str(tmp_path / "no"), "--adapter"]) == 2
    assert "trained without learner.lora" in capsys.readouterr().err
