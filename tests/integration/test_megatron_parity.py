"""Real Megatron over gloo against plain Hugging Face transformers, at every layout, in float32.

One run of megatron_workers.py does all the work; the tests compare what it left behind.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

WORKERS = Path(__file__).with_name("megatron_workers.py")
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300.0

ONE = [
    {"name": "one", "save": True},
    {"name": "untied", "kind": "untied"},
    {"name": "moe", "kind": "moe"},
    {"name": "llama", "kind": "llama"},
    {"name": "mistral", "kind": "mistral"},
    {"name": "bf16", "dtype": "bfloat16", "save": True},
]
TWO = [
    {"name": "tp2-sp", "parallel": {"tensor": 2}},
    {"name": "tp2", "parallel": {"tensor": 2, "sequence": False}, "save": True},
    {"name": "cp2", "parallel": {"context": 2}},
    {"name": "pp2", "parallel": {"pipeline": 2}, "save": True},
    {"name": "dp2", "save": True},
    {"name": "vpp2", "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "save": True},
    {"name": "untied-tp2", "kind": "untied", "parallel": {"tensor": 2}},
    {"name": "moe-ep2", "kind": "moe", "parallel": {"expert": 2}},
    {"name": "moe-tp2-sp", "kind": "moe", "parallel": {"tensor": 2}},
    {"name": "moe-etp2", "kind": "moe", "parallel": {"expert_tensor": 2}},
]
FOUR = [
    {"name": "tp2-pp2-sp", "parallel": {"tensor": 2, "pipeline": 2}},
    {"name": "tp2-cp2-sp", "parallel": {"tensor": 2, "context": 2}},
    {"name": "cp2-pp2", "parallel": {"context": 2, "pipeline": 2}},
    {"name": "moe-ep2-etp2", "kind": "moe", "parallel": {"expert": 2, "expert_tensor": 2}},
]
SAME_ONE = [
    {"name": "one-again", "checkpoint": "one"},
    {"name": "bf16-again", "checkpoint": "bf16", "dtype": "bfloat16"},
]
SAME_TWO = [
    {"name": f"{s['name']}-again", "checkpoint": s["name"], "parallel": s.get("parallel", {})}
    for s in TWO
    if "save" in s
]
OTHER_ONE = [{"name": f"{n}-to-one", "checkpoint": n} for n in ("tp2", "pp2", "dp2", "vpp2")]
OTHER_TWO = [
    {"name": "tp2-to-pp2", "checkpoint": "tp2", "parallel": {"pipeline": 2}},
    {"name": "one-to-dp2", "checkpoint": "one"},
]
EXACT = [s for s in ONE + TWO + FOUR if s.get("dtype") is None]  # float32: equal to Hugging Face


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, what Hugging Face makes of them, what every layout makes of them, and what resumed processes make."""
    place = tmp_path_factory.mktemp("megatron")
    for name in ("models", "checkpoints", "saved"):
        (place / name).mkdir()
    kinds = [{"kind": kind} for kind in ("tied", "untied", "moe", "llama", "mistral")]
    stages = [
        [group(1, "reference", kinds)],
        [group(2, "layout", TWO), group(1, "layout", ONE)],
        [group(4, "layout", FOUR)],
        [group(2, "resume", SAME_TWO + OTHER_TWO), group(1, "resume", SAME_ONE + OTHER_ONE)],
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(WORKERS), str(place), json.dumps(stages), str(TIMEOUT_S)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S + 60)
    if done.returncode != 0:
        logs = [f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(place.glob("*.log"))]
        pytest.fail("\n".join([done.stderr[-3000:], *logs]), pytrace=False)
    return place


def group(ranks: int, job: str, specs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ranks": ranks, "job": job, "specs": specs}


class Outcome:
    """What the ranks of one layout wrote; `tensors` holds what any of them knows."""

    def __init__(self, folder: Path, name: str) -> None:
        files = sorted((folder / name).glob("*.json"))
        self.ranks = [json.loads(file.read_text()) for file in files]
        self.tensors_of = [load_file(file.with_suffix(".safetensors")) for file in files]
        self.tensors = {k: v for tensors in self.tensors_of for k, v in tensors.items()}

    def section(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix + "."): v for k, v in self.tensors.items() if k.startswith(prefix + ".")}


class Reference:
    def __init__(self, folder: Path, kind: str) -> None:
        self.tensors = load_file(folder / f"reference-{kind}.safetensors")
        self.numbers = json.loads((folder / f"reference-{kind}.json").read_text())

    def section(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix + "."): v for k, v in self.tensors.items() if k.startswith(prefix + ".")}


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def layouts(specs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[s["name"] for s in specs])


def outcome(folder: Path, spec: dict[str, Any]) -> tuple[Outcome, Reference]:
    return Outcome(folder, spec["name"]), Reference(folder, spec.get("kind", "tied"))


@layouts(EXACT)
def test_logprobs_equal_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    assert found.section("logprobs").keys() == expected.section("logprobs").keys()
    for name, values in expected.section("logprobs").items():
        torch.testing.assert_close(found.section("logprobs")[name], values, rtol=0, atol=2e-5)


@layouts(TWO + FOUR)
def test_a_single_microbatch_runs_under_every_layout(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    lone = found.section("lone")
    for rank, values in lone.items():  # the canary's case: fewer microbatches than pipeline stages
        torch.testing.assert_close(values, expected.section("logprobs")[rank], rtol=0, atol=2e-5)
    given = {rank["data_parallel_rank"]: rank["lone_given"] for rank in found.ranks}
    assert {rank["lone_tokens"] for rank in found.ranks} == {sum(given.values())}


@layouts(EXACT)
def test_every_gradient_equals_hugging_face(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    gradients, references = found.section("gradient"), expected.section("gradient")
    assert gradients.keys() == references.keys()
    errors = {name: relative(gradients[name], reference) for name, reference in references.items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


@layouts(EXACT)
def test_every_rank_reports_the_loss_and_norm_of_the_global_batch(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    reference = expected.numbers
    for rank in found.ranks:
        assert rank["tokens"] == reference["tokens"]
        assert rank["loss_sum"] / rank["tokens"] == pytest.approx(reference["loss"], rel=1e-5)
        assert rank["sums"]["entropy"] == pytest.approx(reference["entropy"], rel=1e-5)
        assert rank["maxima"]["highest"] == pytest.approx(reference["highest"], rel=1e-4)
        loss, norm, rate = rank["steps"][0]
        assert loss == pytest.approx(reference["loss"], rel=1e-5)
        assert norm == pytest.approx(reference["norm"], rel=1e-5)
        assert rate == pytest.approx(0.5e-3)
        assert rank["steps"] == found.ranks[0]["steps"]


@layouts(EXACT)
def test_steps_equal_torch_adamw_with_clipping(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    before, after, trained = expected.section("weight"), expected.section("trained"), found.section("trained")
    for name, reference in after.items():
        moved = (reference - before[name]).double().norm()
        error = (trained[name] - reference).double().norm()
        assert error < 1e-2 * moved, f"{name}: {error / moved:.1e} of the update"


@layouts(EXACT)
def test_export_gives_the_loaded_weights_back_on_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    found, expected = outcome(folder, spec)
    weights = expected.section("weight")
    assert found.section("weight").keys() == weights.keys()
    for rank, tensors in zip(found.ranks, found.tensors_of, strict=True):
        assert rank["order"] == found.ranks[0]["order"]
        for name, weight in weights.items():
            assert torch.equal(tensors[f"weight.{name}"], weight), name


@layouts(TWO)
def test_bytes_of_rank_0_reach_every_rank(folder: Path, spec: dict[str, Any]) -> None:
    assert [rank["broadcast"] for rank in Outcome(folder, spec["name"]).ranks] == [True, True]


def test_one_and_two_data_parallel_ranks_have_the_same_gradient(folder: Path) -> None:
    one, two = Outcome(folder, "one").section("gradient"), Outcome(folder, "dp2").section("gradient")
    for name, gradient in one.items():
        assert relative(two[name], gradient) < 2e-6, name


def test_bfloat16_trains_close_to_float32(folder: Path) -> None:
    exact, rounded = Outcome(folder, "one"), Outcome(folder, "bf16")
    assert rounded.section("weight")["model.norm.weight"].dtype == torch.bfloat16
    for (loss, norm, _), (loss16, norm16, _) in zip(exact.ranks[0]["steps"], rounded.ranks[0]["steps"], strict=True):
        assert loss16 == pytest.approx(loss, abs=0.05)
        assert norm16 == pytest.approx(norm, rel=0.05)
    cosines = [
        torch.nn.functional.cosine_similarity(gradient.flatten(), rounded.section("gradient")[name].flatten(), dim=0)
        for name, gradient in exact.section("gradient").items()
    ]
    assert min(cosines) > 0.98


@layouts(SAME_ONE + SAME_TWO)
def test_resuming_in_a_new_process_takes_bitwise_the_same_step(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder, spec["checkpoint"]), Outcome(folder, spec["name"])
    assert came_back.ranks[0]["after"] == went_on.ranks[0]["after"]
    assert came_back.section("after").keys() == went_on.section("after").keys()
    for name, weight in went_on.section("after").items():
        assert torch.equal(came_back.section("after")[name], weight), name
    trained = went_on.section("trained")
    assert any(not torch.equal(weight, trained[name]) for name, weight in went_on.section("after").items())


@layouts(OTHER_ONE + OTHER_TWO)
def test_a_checkpoint_loads_under_another_layout(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder, spec["checkpoint"]), Outcome(folder, spec["name"])
    for name, weight in went_on.section("after").items():
        moved = (weight - went_on.section("trained")[name]).norm()
        assert (came_back.section("after")[name] - weight).norm() < 1e-3 * moved, name


def test_a_checkpoint_leaves_no_partial_folder(folder: Path) -> None:
    assert not list((folder / "checkpoints").glob(".*"))
    assert not list((folder / "saved").glob(".*"))


@layouts([s for s in ONE + TWO if "save" in s])
def test_saved_folder_has_the_trained_weights_and_the_sources_other_files(folder: Path, spec: dict[str, Any]) -> None:
    source, saved = folder / "models" / spec.get("kind", "tied"), folder / "saved" / spec["name"]
    assert {f.name for f in saved.iterdir()} == {f.name for f in source.iterdir()}
    for file in source.glob("*.json"):
        assert (saved / file.name).read_bytes() == file.read_bytes()
    weights = load_file(saved / "model.safetensors")
    trained = Outcome(folder, spec["name"]).section("trained")
    assert weights.keys() == trained.keys() == load_file(source / "model.safetensors").keys()
    for name, weight in trained.items():
        assert torch.equal(weights[name], weight), name
