"""A whole job of adapters through its config: they travel, vLLM runs merged weights, and the export has both."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from common.weights.wire.layout import Layout
from launch.quickstart.init import write_example
from tests.rigs.jobs import at_work, metrics, warm
from tests.rigs.processes import SLIPSTREAM, Process
from tests.rigs.waiting import LIMIT_S

STEPS = 3


@pytest.mark.slow
def test_a_job_of_adapters_publishes_these_and_exports_both_kinds_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    write_example(folder)
    document = yaml.safe_load((folder / "config.yaml").read_text())
    document["run"]["steps"] = STEPS
    document["learner"] |= {"groups_per_step": 4, "lora": {"rank": 4}}
    document["learner"]["optimizer"] = {"lr": 1e-2}
    # without overlap a step's line is written when every node runs its version, however slow the machine is
    document["weights"] = {"canary_every": 1, "encoding": "adapter", "overlap": False, "timeout_s": LIMIT_S}
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.chdir(folder)
    with at_work(folder / "config.yaml"):
        pass
    lines = metrics(folder / "run")
    assert [line["step"] for line in lines] == list(range(STEPS))
    # the engine computes with merged weights what the learner computes with adapters beside the base
    assert 0 < max(line["canary_max_difference"] for line in lines) < 1e-3
    assert all(line["mismatch_abs_mean"] < 1e-3 for line in lines if line["staleness_max"] == 0)
    assert any(line["grad_norm"] > 0 for line in lines)
    warm("export", str(folder / "run"), str(folder / "adapter"), "--adapter")
    adapter = load_file("adapter/adapter_model.safetensors")
    layout = Layout.of([(name, "float32", tuple(tensor.shape)) for name, tensor in adapter.items()])
    assert [line["publish_bytes"] for line in lines] == [layout.total_bytes] * STEPS, "adapters, not whole versions"
    base, trained = (load_file(f"{path}/model.safetensors") for path in (document["model"]["path"], "run/model"))
    changed = 0
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            weight = weight + 2.0 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            changed += not torch.equal(trained[name], base[name])
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6)
    assert changed > 0
    words = ["plan", "config.yaml", "learner.lora.targets=[q_proj]"]
    with Process(tmp_path / "no.log", [*SLIPSTREAM, *words], HF_HUB_OFFLINE="1") as refused:
        assert refused.wait() == 2
    assert "linear_qkv" in refused.output()
