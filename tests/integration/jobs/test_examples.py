"""Two of the examples, the cheapest, as their READMEs say; `bash launch/test.sh examples` runs all of them.

The job of adapters is also looked at from inside: they travel, vLLM runs merged weights, and the export has both.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.weights.wire.layout import Layout
from tests.rigs.configs import run_cli
from tests.rigs.jobs import metrics
from tests.rigs.processes import ROOT


def played(name: str, scratch: Path) -> Path:
    """The folder of an example that did what its README says."""
    words = [sys.executable, "bench/example_runs.py", "--dry", name]
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{name}: ok" in done.stdout, done.stdout[:6000] + done.stderr[-4000:]
    (folder,) = scratch.glob(f"slipstream-bench-*/{name}")
    return folder


def test_an_environment_of_ones_own_does_what_the_readme_says(tmp_path: Path) -> None:
    played("own-environment", tmp_path)


def test_adapters_do_what_the_readme_says_are_published_alone_and_exported_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = played("lora", tmp_path)
    lines = metrics(folder / "run")
    # the engine computes with merged weights what the learner computes with adapters beside the base
    assert 0 < max(line["canary_max_difference"] for line in lines) < 1e-3
    fresh = [line["mismatch_abs_mean"] for line in lines if line["staleness_max"] == 0]
    assert fresh and max(fresh) < 1e-3
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    layout = Layout.of([(name, "float32", tuple(tensor.shape)) for name, tensor in adapter.items()])
    assert {line["publish_bytes"] for line in lines[1:]} == {layout.total_bytes}, "adapters, not whole versions"
    base, trained = (load_file(folder / path / "model.safetensors") for path in ("warm-start/model", "run/model"))
    changed = 0
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapter:
            weight = weight + 2.0 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            changed += not torch.equal(trained[name], base[name])
        torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6)
    assert changed > 0
    refused = run_cli(
        "plan", str(folder / "config.yaml"), "learner.lora.targets=[q_proj]", f"model.path={folder}/model"
    )
    assert refused.returncode == 2 and "linear_qkv" in refused.stdout + refused.stderr
