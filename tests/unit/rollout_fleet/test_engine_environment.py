"""The engine on a GPU: it sets nothing that only a CPU needs, and a flip waits for the device."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from common.config.schema import Config, EngineConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from common.weights.transports import nccl
from common.weights.wire import flat_buffer
from common.weights.wire.layout import Layout
from rollout_fleet.engine.engine import Engine, prepare_environment
from rollout_fleet.vllm_patches import socket_folder, worker_process
from tests.rigs.configs import model_folder
from tests.rigs.refusals import refused

CPU_ONLY = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE")

PRECISION = "TRITON_F32_DEFAULT"
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
UNSET = (*CPU_ONLY, SAMPLER, "VLLM_WORKER_MULTIPROC_METHOD", "PYTORCH_NVML_BASED_CUDA_CHECK")


def job(dtype: str = "bfloat16", **engine: Any) -> Config:
    return Config(
        run=RunConfig(name="test", dir="run", steps=1),
        model=ModelConfig(path="model", dtype=cast(Any, dtype)),
        tasks=TasksConfig(environment="none", dataset="none"),
        rollout=RolloutConfig(engine=EngineConfig(max_model_len=64, eager=True, **engine), threads=3),
    )


@pytest.mark.parametrize("cuda", [True, False])
def test_what_a_cpu_needs_is_not_set_for_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    config = job(kv_cache_mib=16)
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    monkeypatch.setattr(os, "environ", environment)
    asked: list[str | None] = []

    def available() -> bool:
        asked.append(environment.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return cuda

    monkeypatch.setattr(torch.cuda, "is_available", available)
    assert prepare_environment(config) is not cuda
    assert environment["OMP_NUM_THREADS"] == "3" and environment["HF_HUB_OFFLINE"] == "1"
    assert [name in environment for name in CPU_ONLY] == [not cuda] * 3
    assert environment.get(SAMPLER) == ("0" if cuda else None), "vLLM would compile it for nothing"
    assert asked == ["1"], "otherwise the question makes CUDA unusable in a forked child"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "ieee"), ("bfloat16", None)])
def test_attention_in_float32_multiplies_as_float32(
    monkeypatch: pytest.MonkeyPatch, dtype: str, expected: str | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (*UNSET, PRECISION)}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare_environment(job(dtype))
    assert environment.get(PRECISION) == expected


@pytest.mark.parametrize(("bytes_of_folder", "is_too_long"), [(70, False), (71, True)])
def test_sockets_of_the_engine_lie_where_their_paths_are_short_enough(
    monkeypatch: pytest.MonkeyPatch, bytes_of_folder: int, is_too_long: bool
) -> None:
    monkeypatch.setenv("TMPDIR", os.environ.get("TMPDIR", "/tmp"))  # comes back after the test
    monkeypatch.setattr(tempfile, "tempdir", long := "/".ljust(bytes_of_folder, "x"))
    socket_folder.shorten()
    assert tempfile.gettempdir() == ("/tmp" if is_too_long else long)
    assert (os.environ["TMPDIR"] == "/tmp") or not is_too_long


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "on_cpu", "share"), [(16, False, 0.01), (None, False, 0.9), (16, True, 0.9)])
def test_a_share_of_a_gpu_is_asked_for_only_where_it_decides_the_size_of_the_cache(
    cache: int | None, on_cpu: bool, share: float
) -> None:
    engine = Engine(job(kv_cache_mib=cache), stop_token_ids=[])
    assert engine._arguments(on_cpu)["gpu_memory_utilization"] == share


@pytest.mark.slow
def test_an_engine_on_a_gpu_prepares_no_unused_kernels_at_its_start_unless_it_is_asked_to() -> None:
    from vllm.config.kernel import KernelConfig

    def prepares(on_cpu: bool, **engine: Any) -> tuple[bool, bool]:
        arguments = Engine(job(**engine), stop_token_ids=[])._arguments(on_cpu)
        kernels = KernelConfig(**arguments.get("kernel_config", {}))
        return kernels.enable_jit_warmup, kernels.enable_flashinfer_autotune is not False  # None: vLLM decides

    assert prepares(False) == (False, False)
    assert prepares(False, extra={"kernel_config": {}}) == prepares(True) == (True, True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns when a class is imported
@pytest.mark.parametrize("cuda", [True, False])
def test_no_second_python_looks_at_the_models_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool
) -> None:
    from vllm import ModelRegistry, plugins
    from vllm.model_executor.models import registry

    def in_a_second_python(work: object) -> None:
        raise AssertionError("vLLM starts a Python that imports it again")

    name = "Qwen3ForCausalLM"
    seen: list[str] = []
    create = lambda *_, **__: seen.append(ModelRegistry.models[name].inspect_model_cls().architecture)  # noqa: E731
    monkeypatch.setattr(os, "environ", os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: None)  # they would change vLLM in this process
    monkeypatch.setattr(registry, "_run_in_subprocess", in_a_second_python)
    unknown = registry._LazyRegisteredModel("vllm.model_executor.models.qwen3", name)
    monkeypatch.setitem(ModelRegistry.models, name, unknown)
    llm = SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=create))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)
    config = job()
    folder = msgspec.structs.replace(config.model, path=str(model_folder(tmp_path, architectures=[name])))
    Engine(msgspec.structs.replace(config, model=folder), stop_token_ids=[])._create()
    assert seen == [name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "devices", "expected"), [(80, 1, 8192), (24, 1, 2048), (0, 1, 2048), (0, 2, 4096)]
)  # 0: a CPU
def test_a_step_takes_as_many_tokens_as_in_the_server_of_vllm(
    monkeypatch: pytest.MonkeyPatch, gib: int, devices: int, expected: int
) -> None:
    from vllm import plugins
    from vllm.engine import arg_utils

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib > 0)
    monkeypatch.setattr(plugins, "load_general_plugins", lambda: None)  # they would change vLLM in this process
    asked: list[tuple[Any, Any]] = []
    create = lambda arguments, usage_context=None, **_: asked.append((arguments, usage_context))  # noqa: E731
    llm = SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=create))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", llm)
    Engine(job(tensor_parallel=devices), stop_token_ids=[])._create()
    ((arguments, context),) = asked
    device = dict(get_device_total_memory=lambda: gib << 30, get_device_name=lambda: "a GPU", is_tpu=lambda: False)
    monkeypatch.setattr(arg_utils, "current_platform", SimpleNamespace(**device, is_cpu=lambda: gib == 0))
    model, parallel = SimpleNamespace(max_model_len=64, is_multimodal_model=False), SimpleNamespace()
    parallel.use_batched_dp_moe = False
    arguments._set_default_max_num_seqs_and_batched_tokens_args(context, model, parallel)
    assert (arguments.max_num_batched_tokens, arguments.max_num_seqs) == (expected, 256)


@pytest.mark.slow
def test_on_a_gpu_the_proof_reads_in_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_fleet.weights import weight_proof
    from rollout_fleet.weights.worker_extension import SlipstreamTransferEngine

    done: list[str] = []

    @contextmanager
    def within(stream: str) -> Iterator[None]:
        done.append(f"into {stream}")
        yield
        done.append(f"out of {stream}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(weight_proof, "checksum", lambda model, layout: done.append("read") or "sum")
    engine = object.__new__(SlipstreamTransferEngine)
    engine.device, engine.model, engine._loaded = torch.device("cuda", 1), None, None
    engine.workers = cast(Any, SimpleNamespace(lock=lambda: done.append(f"lock after {engine.proof}")))
    nccl._stream_for.cache_clear()
    engine._prove(1, 2, Layout.of([("w", "float32", (2,))]))
    nccl._stream_for.cache_clear()  # a later test may ask for a real one
    assert engine.proof == weight_proof.Proof(1, 2, "sum")
    assert done == ["into a stream of cuda:1", "read", "out of a stream of cuda:1", f"lock after {engine.proof}"]


@pytest.mark.slow
def test_on_a_gpu_a_flip_ends_when_the_device_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_fleet.weights.worker_extension import SlipstreamTransferEngine, SlipstreamUpdateInfo

    asked: list[str] = []
    layout = Layout.of([("w", "float32", (2,))])
    flat = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    engine = object.__new__(SlipstreamTransferEngine)
    agree = lambda error: asked.append(f"agree {error}")  # noqa: E731
    engine.workers = SimpleNamespace(take=lambda *version: flat, agree=agree, size=1, receives=False)
    engine.receiver = SimpleNamespace(layout=layout)
    engine.model_config = SimpleNamespace(dtype=torch.float32, quantization=None)
    engine.model = SimpleNamespace(load_weights=lambda tensors: asked.append(", ".join(n for n, _ in tensors)))
    stream = SimpleNamespace(synchronize=lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(worker_process, "renew", lambda model, dtype: asked.append(f"renew {dtype}"))
    monkeypatch.setattr(flat_buffer, "view", lambda flat, layout: [("w", flat)])
    engine.receive_weights(SlipstreamUpdateInfo(1, 2))
    assert asked == ["agree None", "w", "renew torch.float32", "synchronize", "agree None"]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8_per_channel"])
def test_no_worker_begins_to_load_while_another_lacks_the_version(quantization: str | None) -> None:
    """Rounding is collective in vLLM: the others would wait for the one without."""
    from rollout_fleet.weights.worker_extension import SlipstreamTransferEngine, SlipstreamUpdateInfo

    layout = Layout.of([("a.weight", "bfloat16", (4, 2))])
    loaded: list[object] = []

    def another_failed(error: Exception | None) -> None:
        raise error or ValueError("1 of 2 workers could not load their shards")

    engine = SlipstreamTransferEngine.__new__(SlipstreamTransferEngine)
    engine.receiver = cast(Any, SimpleNamespace(layout=layout))
    flat = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    engine.workers = cast(Any, SimpleNamespace(take=lambda *_: flat, agree=another_failed, size=2, receives=False))
    engine.model = torch.nn.Module()
    engine.model.load_weights = lambda weights: loaded.extend(weights)
    engine.model_config = cast(Any, SimpleNamespace(quantization=quantization, dtype=torch.bfloat16))
    with refused(ValueError, "1 of 2 workers"):
        engine.receive_weights(SlipstreamUpdateInfo(incarnation=1, version=2))
    assert loaded == []
