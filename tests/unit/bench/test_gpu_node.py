"""The sides of bench/gpu_node.py compute alike, and a figure from one window is left out."""

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import gpu_node
import pytest
import talk
import torch
from node_throughput import bare
from talk import Serving, Shape

from common.config.schema import EngineConfig, WeightsConfig

SHAPE = Shape(turns=1, answer=4, prompt=4, observation=0, requests=2)


class Stop(Exception): ...


@pytest.mark.parametrize("cuda", [True, False])
def test_bare_vllm_and_a_node_start_with_the_same_batch_and_without_warm_up(
    monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    asked: dict[str, Any] = {}

    def create(model: str, **arguments: Any) -> None:
        asked.update(arguments)
        raise Stop

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=create, SamplingParams=None))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", SimpleNamespace(RequestOutputKind=None))
    options: Any = SimpleNamespace(short=True, graphs="decode", attention="")
    serving = gpu_node.serving("graphs async", options, cuda)
    with pytest.raises(Stop):
        bare("model", SHAPE, None, serving)
    job = object.__new__(talk.NodeJob)
    job._shape, job._step, job._staleness, job._serving = SHAPE, 1, 1, serving
    engine = job._config(Path("job"), Path("model"), {})["rollout"]["engine"]
    assert engine.keys() <= set(EngineConfig.__struct_fields__)
    assert asked["max_num_batched_tokens"] == engine["max_batched_tokens"] == 8192
    off = {"enable_jit_warmup": False, "enable_flashinfer_autotune": False}
    assert asked.get("kernel_config") == (off if cuda else None)


def test_on_a_cpu_bare_vllm_takes_the_batch_that_a_node_takes_by_itself() -> None:
    assert Serving().max_batched_tokens == 2048


def test_the_learner_of_a_node_has_the_keys_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[WeightsConfig] = []

    def publisher(incarnation: int, dtype: str, weights: WeightsConfig) -> None:
        asked.append(weights)
        raise Stop

    def broker(folder: Path, name: str, *words: str, **environment: str) -> contextlib.nullcontext[None]:
        (tmp_path / "job/run").mkdir(exist_ok=True)
        (tmp_path / "job/run/broker.json").write_text('{"address": ""}')
        return contextlib.nullcontext()

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda model, dtype: None)
    monkeypatch.setattr("tests.rigs.processes.Command", broker)
    monkeypatch.setattr("broker.client.connection.BrokerClient", MagicMock())
    monkeypatch.setattr("common.weights.source.publisher.WeightPublisher", publisher)
    with pytest.raises(Stop):
        talk.NodeJob(tmp_path / "job", tmp_path, SHAPE, step=1, weights={"bucket_mib": 64})
    assert asked == [WeightsConfig(bucket_mib=64, timeout_s=60.0)]


def windows(number: int) -> dict[str, Any]:
    still = {"tokens": 1000, "wall_s": 10.0, "cpu_s": 1.0}
    flips = {"tokens": 900, "wall_s": 10.0, "cpu_s": 1.0, "flips": 5, "pause_ms": 2.0}
    return {f"a, {name} {i}": w for i in range(number) for name, w in [("window", still), ("flips, window", flips)]}


def test_tokens_per_flip_need_several_windows() -> None:
    assert "tokens_lost_per_flip" not in gpu_node.row("a", windows(1))
    assert gpu_node.row("a", windows(2))["tokens_lost_per_flip"] == 20


def test_bare_vllm_is_ready_before_the_nodes_start_and_a_late_side_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Start:
        def __init__(self, work: Any) -> None:
            self.kind = work.args[0]
            order.append(f"{self.kind} starts")

        def result(self, timeout: float = 0.0) -> Any:
            if self.kind == "eager plain":
                raise TimeoutError
            order.append(f"{self.kind} is ready") if timeout else None
            return SimpleNamespace(processes=[])

    def logs(folder: Path) -> str:
        assert folder.name == "eager-plain"
        return "the end of its log"

    monkeypatch.setattr(gpu_node, "_build", lambda *_: {})
    monkeypatch.setattr(gpu_node, "_kill_others", lambda _: None)  # they are other tests' here
    monkeypatch.setattr(gpu_node, "begun", Start)
    monkeypatch.setattr(gpu_node, "ends_of_logs", logs)
    kinds = ["graphs async", "eager plain"]
    options: Any = SimpleNamespace(short=True, kinds=kinds, start_s=200.0, output="", dry=False)
    figures: dict[str, Any] = {}
    with gpu_node.sides(options, figures, True) as found:
        assert [*found] == ["bare", "graphs async"]
    starts = ["bare starts", "bare is ready", "graphs async starts", "eager plain starts", "graphs async is ready"]
    assert order == starts
    assert "the end of its log" in figures["start of eager plain"]["error"]


def test_the_attention_libraries_that_load_are_said_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = tmp_path / "vllm" / "vllm_flash_attn"
    libraries.mkdir(parents=True)
    (libraries.parent / "__init__.py").touch()
    (libraries / "_vllm_fa3_C.abi3.so").write_text("for another torch")
    monkeypatch.setattr(gpu_node, "interpreter", lambda role: (None, sys.executable))
    monkeypatch.setattr(gpu_node.harness, "python_path", lambda: str(tmp_path))
    found = gpu_node.attention_libraries()
    assert found["FlashAttention 3"].startswith("does not load: ")
    assert found["FlashAttention 2"] == "is not installed"
    assert capsys.readouterr().out.startswith("attention: FlashAttention 3 does not load: ")
