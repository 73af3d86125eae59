"""The parts of bench/gpu_learner.py that need no device: operations, layers that fit, and its rows."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_learner
import gpu_learner_parts
import pytest
from gpu_learner import SCALES, jobs_of, largest, recomputes, with_mfu
from random_qwen3 import Model, write_header

from bench.figures import RESULTS
from common.config.schema import ParallelConfig
from common.safetensors_header import headers
from launch.plan.layout import count, hf_tensors
from launch.plan.memory import output_bytes

H100 = 81559 * float(1 << 20)
GIB = 1 << 30


@pytest.mark.parametrize("shape", ["0.6B", "8B"])
def test_operations_are_those_of_every_product(shape: str) -> None:
    model = Model(shape, 3, 151936)
    tensors = dict(hf_tensors(model.architecture))
    matrices = {name: a * b for name, (a, *more) in tensors.items() for b in more}
    if not model.architecture.tied:
        matrices.pop("model.embed_tokens.weight")  # looked up, not multiplied
    heads = model.architecture.attention.heads
    pairs = sum(range(1, 9))  # tokens that each token of a document of 8 sees
    attention = 3 * 2 * 2 * heads * 128 * pairs * 3  # forward and twice backward, two products, layers
    assert model.flops(16, 8) == 6 * 16 * sum(matrices.values()) + 2 * attention


def test_a_shape_gets_the_layers_that_the_plan_says_to_fit() -> None:
    layers = {shape: largest(shape, SCALES["full"], H100).layers for shape in SCALES["full"].shapes}
    assert layers == {"0.6B": 24, "4B": 21, "8B": 10}
    assert largest("8B", SCALES["full"], 2 * H100).layers == 24


def test_what_layers_keep_decides_on_recomputation() -> None:
    jobs = [job for job in jobs_of(SCALES["full"], H100, 1, 1.0) if job.part == "train"]
    first, four = (job for job in jobs[:2])
    assert (first.labels["model"].shape, four.labels["model"].shape) == ("0.6B", "4B")
    assert recomputes(four, H100, 1.0) == [{"recompute": "none"}, {"recompute": "full"}]
    assert recomputes(four, H100, 2.0) == [{"recompute": "full"}]


def test_the_folder_has_the_names_and_shapes_of_the_model_and_takes_no_space(tmp_path: Path) -> None:
    model = Model("4B", 2, 151936)
    write_header(tmp_path, model)
    (file,) = tmp_path.iterdir()
    ((_, begin, told),) = list(headers(tmp_path))
    assert {name: tuple(each["shape"]) for name, each in told.items()} == dict(hf_tensors(model.architecture))
    assert file.stat().st_size == begin + 2 * count(model.architecture)
    assert file.stat().st_blocks * 512 < 1 << 20


def test_a_row_says_its_mfu() -> None:
    row = with_mfu({"ways": [{"model_tflops": 400.0, "s": 0.123456789}]}, 800.0, 1000.0)
    assert row == {"ways": [{"model_tflops": 400.0, "s": 0.12346, "mfu": 0.5, "mfu_of_datasheet": 0.4}]}


def test_the_name_and_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.accelerator", lambda: "NVIDIA H100 80GB HBM3, 81559 MiB, 580.159.04")
    assert gpu_learner.gpu() == ("NVIDIA H100 80GB HBM3", H100)
    monkeypatch.setattr("harness.accelerator", lambda: "none")
    assert gpu_learner.gpu() == ("", 0.0)


def test_a_save_that_is_timed_deletes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[str]] = []

    def start(path: Path) -> None:
        found.append([each.name for each in path.parent.iterdir()])
        path.mkdir()
        (path / "weights").write_bytes(bytes(1000))

    backend = SimpleNamespace(start_checkpoint=start, checkpoint_done=lambda wait: True)
    monkeypatch.setattr(gpu_learner_parts, "backend_of", lambda model: backend)
    monkeypatch.setattr(gpu_learner_parts, "learner_step", lambda backend, batches: lambda: None)
    monkeypatch.setattr(gpu_learner_parts, "batches_of", lambda *_: [])
    monkeypatch.setattr(gpu_learner_parts, "resident_of", lambda backend: {"weights": 0})
    monkeypatch.setattr(gpu_learner_parts, "copies", dict)
    saves = gpu_learner_parts.checkpoint(Model("4B", 4, 151936), 2048)["saves"]
    assert [save["gb"] for save in saves] == [1e-6, 1e-6]
    assert found == [[], []]


RESULT = json.loads((RESULTS / "gpu_learner.json").read_text())


@pytest.mark.parametrize("row", [row for row in RESULT["train"] if row["blocks"] == "fused" and "memory" in row])
def test_the_plan_is_what_a_gpu_allocated(row: dict[str, Any]) -> None:
    model = Model(row["shape"], row["layers"], row["vocabulary"])
    planned = model.planned(row["tokens"], row["recompute"])
    norm = 2 * row["tokens"] * model.config().hidden_size * 2  # the final one's, measured with the layers
    planned["activations"] += norm
    for found in row["memory"]:
        if found["kind"] in ("weights", "gradients", "optimizer", "activations", "update"):
            assert found["gib"] * GIB == pytest.approx(planned[found["kind"]], rel=0.05), found["kind"]


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_the_plan_of_the_output_layer_is_what_a_gpu_allocated(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in RESULT["head"] if row["tokens"] == tokens]
    model = Model(row["shape"], 1, row["vocabulary"])
    for rows in (1024, 4096):
        (found,) = [way for way in row["ways"] if way["way"] == f"chunks of {rows} rows, none kept"]
        monkeypatch.setattr("launch.plan.memory.CHUNK_ELEMENTS", rows * row["vocabulary"])
        inputs = 3 * tokens * model.config().hidden_size * 2  # norm and head have them before
        planned = output_bytes(model.architecture, ParallelConfig(), tokens, 2) - inputs
        assert found["peak_gib"] * GIB == pytest.approx(planned, rel=0.05)
