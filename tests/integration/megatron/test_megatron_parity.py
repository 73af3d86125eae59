"""Real Megatron against plain Hugging Face transformers on the CPU, at every layout, in float32.

A layout that computes in bfloat16 is compared with the same float32 model, with the tolerances of bfloat16.

The proven figures are also written as rows of JSON to the file that SLIPSTREAM_LAYOUTS names (bench/layouts.py makes
docs/layouts.md of it).
"""

import functools
import hashlib
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import CUDA, LOOSE, RANKS, TF32
from tests.rigs.forked_ranks import Outcome, group, relative, same, worst
from tests.rigs.layouts import LAYOUTS, Layout, computed
from tests.rigs.tiny_models import STEPS, TEMPERATURE, exported, microbatches, policy_loss

BF16 = {"name": "bf16", "kind": "tied", "dtype": "bfloat16", "save": True}
SAVED = {"tied-one", "tied-tp2-sp", "tied-pp2-vpp2", "moe-tp2-sp-ep2"}
VERIFIED = {*SAVED, "tied-cp2", "moe-tp2-sp-pp2-cp2-ep2-etp2"}


@dataclass(frozen=True)
class Tolerance:
    logprobs: float
    gradient: float  # relative, of each parameter's norm
    figures: float  # relative
    highest: float  # relative


FLOAT32 = Tolerance(logprobs=2e-5 * LOOSE, gradient=1e-5 * LOOSE, figures=1e-5 * LOOSE, highest=1e-4 * LOOSE)
BFLOAT16 = Tolerance(logprobs=0.8, gradient=0.25, figures=0.03, highest=0.1)
ROUTED = Tolerance(logprobs=4.0, gradient=0.4, figures=0.06, highest=0.2)  # rounding sends some tokens to other experts

# One layout that only Transformer Engine computes in bfloat16 is tried so everywhere.
ROUNDED = [x for x in computed(LAYOUTS, fused=True) if x.name == "tied-cp2-bf16" and x not in LAYOUTS]
TRIED = (*LAYOUTS, *ROUNDED)

Record = Callable[[str, object], None]  # pytest writes the figure into the results

every = pytest.mark.parametrize("layout", TRIED, ids=[layout.name for layout in TRIED])


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """A model, and what plain Hugging Face and autograd make of the documents."""
    kind = spec["kind"]
    model = tiny_models.save(tiny_models.new_model(kind), folder / "models" / kind)
    tensors, result = tiny_models.reference(model)
    tensors |= {f"weight.{n}": w for n, w in tiny_models.in_files(model).items()}
    tiny_models.adamw_steps(model)
    tensors |= {f"trained.{n}": w for n, w in tiny_models.in_files(model).items()}
    forked_ranks.write(folder / "reference" / kind, 0, tensors, result)


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Log-probabilities, round trip; a step with its gradients, which is taken back, then it and more, an export.

    Rank 0 alone writes what every rank has; the others leave a digest of it.
    """
    backend = tiny_models.backend(folder, spec)
    sent = [b"", bytes(range(256)) * 5]
    got = [backend.broadcast_bytes(data if backend.rank == 0 else None) for data in sent]
    weights = exported(backend, "weight")
    result: dict[str, Any] = {"broadcast": got == sent, "order": list(weights), "exported": digest(weights)}
    tensors = weights if backend.rank == 0 else {}
    tensors |= tiny_models.logprobs(backend)
    mine = tiny_models.share(backend, microbatches(0))
    lone = backend.schedule.train(mine[:1], policy_loss, TEMPERATURE, entropy=True)
    result |= dict(lone_tokens=lone.loss_tokens, lone_given=int(mine[0].loss_mask.sum()))
    result["data_parallel_rank"] = backend.data_parallel_rank
    tensors |= tiny_models.numbered(backend, backend.logprobs(mine[:1], TEMPERATURE), "lone")
    before = [p.detach().clone() for p in parameters_of(backend)]
    first, gradients = tiny_models.step_and_gradients(backend, mine)
    tensors |= gradients if backend.rank == 0 else {}
    result |= dict(tokens=first.loss_tokens, sums=first.sums, maxima=first.maxima)
    if spec["dtype"] == "float32" and not CUDA:
        found = own_weights(backend)
        take_back(backend, before)
        result["repeats"] = (first, found) == (tiny_models.step(backend, 0), own_weights(backend))
    steps = [first, *(tiny_models.step(backend, number) for number in range(1, STEPS))]
    result["steps"] = [[s.loss, s.grad_norm, s.lr] for s in steps]
    trained = exported(backend, "trained")
    result["trained"] = digest(trained)
    tensors |= trained if backend.rank == 0 else {}
    if spec.get("save"):
        backend.save_hf(folder / "saved" / spec["name"])
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def digest(tensors: dict[str, Tensor]) -> str:
    """The hash of every bit of the tensors, in their order."""
    found = hashlib.sha256()
    for tensor in tensors.values():
        found.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def own_weights(backend: Any) -> str:
    """The hash of every bit of this rank's part; an export of all of them would take as long as a step."""
    with backend.offload.whole():
        return digest({str(i): p for i, p in enumerate(parameters_of(backend))})


def parameters_of(backend: Any) -> list[Tensor]:
    return [p for chunk in backend.chunks for p in chunk.module.parameters()]


def take_back(backend: Any, before: list[Tensor]) -> None:
    """Undo the first step, before which the parameters had these values."""
    with torch.no_grad():
        for parameter, value in zip(parameters_of(backend), before, strict=True):
            parameter.copy_(value)
    for optimizer in backend.optimizer.megatron.chained_optimizers:
        optimizer.optimizer.state.clear()
    backend.optimizer.steps = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, what Hugging Face makes of them, and what every layout makes of them."""
    specs = [x.spec | {"save": x.name in SAVED, "verify": x.name in VERIFIED, "ranks": x.ranks} for x in TRIED]
    references = [{"kind": kind} for kind in sorted({spec["kind"] for spec in specs})]
    groups = group(job_reference, references, shared=True), group(job_layout, [BF16, *specs], shared=True)
    return forked_ranks.run(tmp_path_factory, *groups)


@functools.cache
def found_of(folder: Path, name: str) -> Outcome:
    return Outcome(folder / name)


def outcome(folder: Path, layout: Layout) -> tuple[Outcome, Outcome]:
    return found_of(folder, layout.name), found_of(folder, f"reference/{layout.model}")


def exact(layout: Layout) -> bool:
    """Whether errors are those of float32; TF32 sends some tokens to other experts, as bfloat16 does."""
    return layout.dtype == "float32" and not (TF32 and layout.kind == "moe")


def tolerance(layout: Layout) -> Tolerance:
    return FLOAT32 if exact(layout) else ROUTED if layout.kind == "moe" else BFLOAT16


def gradient_error(folder: Path, layout: Layout) -> float:
    """The largest relative error of a parameter's gradient; the median where tokens go to other experts."""
    found, expected = (one.section("gradient") for one in outcome(folder, layout))
    assert found.keys() == expected.keys()
    error, name = worst(found, expected)
    if tolerance(layout) is ROUTED:
        error = statistics.median(relative(found[name], gradient) for name, gradient in expected.items())
    assert error < tolerance(layout).gradient, name
    return error


def test_layouts_with_context_parallelism_and_no_others_are_rounded_under_transformer_engine() -> None:
    found = [(layout.dtype, layout.config.context > 1) for layout in computed(LAYOUTS, fused=True)]
    assert set(found) <= {("bfloat16", True), ("float32", False)}
    assert computed(LAYOUTS, fused=False) == LAYOUTS


@every
def test_logprobs_and_every_gradient_equal_hugging_face(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    same(found.section("logprobs"), expected.section("logprobs"), atol=tolerance(layout).logprobs)
    gradient_error(folder, layout)


@every
def test_a_single_microbatch_runs_under_every_layout(folder: Path, layout: Layout) -> None:
    """The canary's case: fewer microbatches than pipeline stages."""
    found, expected = outcome(folder, layout)
    lone, everywhere = found.section("lone"), expected.section("logprobs")
    trained = {number: everywhere[number] * microbatches(0)[int(number)].loss_mask for number in lone}
    same(lone, trained, atol=tolerance(layout).logprobs)
    given = {rank["data_parallel_rank"]: rank["lone_given"] for rank in found.ranks}
    assert len(given) == layout.data
    assert {rank["lone_tokens"] for rank in found.ranks} == {sum(given.values())}


@every
def test_every_rank_reports_the_loss_and_norm_of_the_global_batch(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    (reference,), allowed = expected.ranks, tolerance(layout)
    for rank in found.ranks:
        assert rank["tokens"] == reference["tokens"]
        assert rank["sums"]["entropy"] == pytest.approx(reference["entropy"], rel=allowed.figures)
        assert rank["maxima"]["highest"] == pytest.approx(reference["highest"], rel=allowed.highest)
        loss, norm, rate = rank["steps"][0]
        assert loss == pytest.approx(reference["loss"], rel=allowed.figures)
        assert norm == pytest.approx(reference["norm"], rel=allowed.figures)
        assert rate == pytest.approx(0.5e-3)
        assert rank["steps"] == found.ranks[0]["steps"]


@every
def test_steps_equal_torch_adamw_with_clipping(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    if exact(layout):
        tiny_models.check_update(expected.section("weight"), found.section("trained"), expected.section("trained"))
    else:  # rounding moves a weight as far as the steps do
        assert worst(found.section("trained"), expected.section("trained")) < (0.01, "")
    assert len({rank["trained"] for rank in found.ranks}) == 1


EXACT = [x for x in TRIED if x.dtype == "float32"]


@pytest.mark.skipif(CUDA, reason="kernels of CUDA add in any order")
@pytest.mark.parametrize("layout", EXACT, ids=[layout.name for layout in EXACT])
def test_a_step_repeats_bitwise_from_the_same_state(folder: Path, layout: Layout) -> None:
    found, _ = outcome(folder, layout)
    assert [rank["repeats"] for rank in found.ranks] == [True] * layout.ranks


@every
def test_export_gives_the_loaded_weights_back_on_every_rank(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    dtype = getattr(torch, layout.dtype)
    same(found.section("weight"), {name: weight.to(dtype) for name, weight in expected.section("weight").items()})
    first = found.ranks[0]
    for rank in found.ranks:
        assert (rank["order"], rank["exported"]) == (first["order"], first["exported"])
        assert rank["broadcast"], "bytes of rank 0 reach every rank"


PADDED = [x for x in LAYOUTS if x.kind != "tied" and (x.config.context > 1 or x.config.sequence_parallel)]


@pytest.mark.parametrize("layout", PADDED, ids=[layout.name for layout in PADDED])
def test_pads_leave_no_gradient_in_their_embedding(folder: Path, layout: Layout) -> None:
    gradient = found_of(folder, layout.name).section("gradient")["model.embed_tokens.weight"]
    assert gradient[0].count_nonzero() == 0  # token 0 is in no document, and in every pad
    assert gradient[3:].count_nonzero() > 0


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_data_parallel_ranks_have_the_gradient_of_one(folder: Path, kind: str) -> None:
    alone = {"context": 1, "tensor": 1, "pipeline": 1}
    alike = [x for x in LAYOUTS if x.kind == kind and not set(x.parallel) & set(alone) and x.data == x.ranks]
    assert {layout.data for layout in alike} >= {size for size in (1, 2, 4) if size <= RANKS}
    norms = [found_of(folder, layout.name).ranks[0]["steps"][0][1] for layout in alike]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6 * LOOSE)
    one, *others = (found_of(folder, layout.name).section("gradient") for layout in alike)
    assert max((worst(other, one) for other in others), default=(0.0, "")) < (4e-6 * LOOSE, "")


def test_bfloat16_trains_close_to_float32(folder: Path, record_property: Record) -> None:
    single, rounded = found_of(folder, "tied-one"), found_of(folder, "bf16")
    assert rounded.section("weight")["model.norm.weight"].dtype == torch.bfloat16
    for (loss, norm, _), (loss16, norm16, _) in zip(single.ranks[0]["steps"], rounded.ranks[0]["steps"], strict=True):
        assert loss16 == pytest.approx(loss, abs=0.05)
        assert norm16 == pytest.approx(norm, rel=0.05)
    cosines = [
        torch.nn.functional.cosine_similarity(gradient.flatten(), rounded.section("gradient")[name].flatten(), dim=0)
        for name, gradient in single.section("gradient").items()
    ]
    assert min(cosines) > 0.98
    record_property("least cosine of a bfloat16 gradient", f"{min(cosines):.4f}")


@pytest.mark.parametrize("name", [*(x.name for x in LAYOUTS if x.name in SAVED), "bf16"])
def test_saved_folder_has_the_trained_weights_and_the_sources_other_files(folder: Path, name: str) -> None:
    model = next((layout.model for layout in LAYOUTS if layout.name == name), BF16["kind"])
    source, saved = folder / "models" / model, folder / "saved" / name
    assert {f.name for f in saved.iterdir()} == {f.name for f in source.iterdir()}
    for file in source.glob("*.json"):
        assert (saved / file.name).read_bytes() == file.read_bytes()
    weights = load_file(saved / "model.safetensors")
    assert weights.keys() == load_file(source / "model.safetensors").keys()
    same(weights, found_of(folder, name).section("trained"))
    assert not list((folder / "saved").glob(".*"))


def test_what_is_proven_is_written_down(folder: Path, record_property: Record) -> None:
    rows = []
    errors = [gradient_error(folder, layout) for layout in LAYOUTS]
    for layout, error in zip(LAYOUTS, errors, strict=True):
        repeats = all(rank.get("repeats", False) for rank in found_of(folder, layout.name).ranks)
        assert repeats or CUDA
        rows.append(layout.cells | {"worst gradient error": f"{error:.1e}", "repeatable": "yes" if repeats else "no"})
    file = Path(os.environ.get("SLIPSTREAM_LAYOUTS") or folder / "layouts.json")
    file.write_text(json.dumps(rows, indent=1) + "\n")
    record_property("layouts", len(rows))
    precise = [error for layout, error in zip(LAYOUTS, errors, strict=True) if layout.dtype == "float32"]
    rounded = [gradient_error(folder, layout) for layout in TRIED if layout.dtype == "bfloat16"]
    record_property("worst gradient error", f"{max(precise):.1e}")
    record_property("worst gradient error in bfloat16", f"{max(rounded, default=0):.1e}")
