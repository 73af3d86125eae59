"""Real Megatron over gloo against plain Hugging Face transformers, at every layout, in float32.

One run of megatron_workers.py does all the work; the tests compare what it left behind. What they prove is also
written as rows of JSON to the file that SLIPSTREAM_LAYOUTS names (bench/layouts.py makes docs/layouts.md of it).
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integration import fork_rig
from tests.integration.fork_rig import Outcome, group, relative
from tests.integration.layouts import LAYOUTS, MODELS, Layout

BF16 = {"name": "bf16", "kind": "tied", "dtype": "bfloat16", "save": True}
SAVED = {"tied-one", "tied-tp2-sp", "tied-pp2-vpp2", "moe-tp2-sp-ep2"}
VERIFIED = {*SAVED, "tied-cp2", "moe-tp2-sp-pp2-cp2-ep2-etp2"}
TOLERANCE = 1e-5

every = pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.name for layout in LAYOUTS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, what Hugging Face makes of them, and what every layout makes of them."""
    place = tmp_path_factory.mktemp("megatron")
    for name in ("models", "saved"):
        (place / name).mkdir()
    specs: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in (1, 2, 4, 8)}
    for layout in LAYOUTS:
        # the check of `model.verify` costs two more models: at some layouts only
        specs[layout.ranks].append(layout.spec | {"save": layout.name in SAVED, "verify": layout.name in VERIFIED})
    worlds = [
        group(1, "reference", [{"kind": kind} for kind in MODELS]),
        group(2, "layout", specs[2]),
        group(1, "layout", [*specs[1], BF16]),
        group(4, "layout", specs[4]),
        group(8, "layout", specs[8]),
    ]
    fork_rig.run("megatron_workers", place, worlds)
    return place


class Reference:
    """What Hugging Face and autograd make of a kind of model."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.tensors = load_file(folder / f"reference-{kind}.safetensors")
        self.numbers = json.loads((folder / f"reference-{kind}.json").read_text())

    def section(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix + "."): v for k, v in self.tensors.items() if k.startswith(prefix + ".")}


@functools.cache
def found_of(folder: Path, name: str) -> Outcome:
    return Outcome(folder / name)


@functools.cache
def expected_of(folder: Path, kind: str) -> Reference:
    return Reference(folder, kind)


def outcome(folder: Path, layout: Layout) -> tuple[Outcome, Reference]:
    return found_of(folder, layout.name), expected_of(folder, layout.kind)


def gradient_errors(folder: Path, layout: Layout) -> dict[str, float]:
    """Relative error of each parameter's gradient."""
    found, expected = outcome(folder, layout)
    gradients, references = found.section("gradient"), expected.section("gradient")
    assert gradients.keys() == references.keys()
    return {name: relative(gradients[name], reference) for name, reference in references.items()}


@every
def test_logprobs_equal_hugging_face(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    assert found.section("logprobs").keys() == expected.section("logprobs").keys()
    for name, values in expected.section("logprobs").items():
        torch.testing.assert_close(found.section("logprobs")[name], values, rtol=0, atol=2e-5)


@every
def test_a_single_microbatch_runs_under_every_layout(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    lone = found.section("lone")
    for rank, values in lone.items():  # the canary's case: fewer microbatches than pipeline stages
        torch.testing.assert_close(values, expected.section("logprobs")[rank], rtol=0, atol=2e-5)
    given = {rank["data_parallel_rank"]: rank["lone_given"] for rank in found.ranks}
    assert len(given) == layout.data
    assert {rank["lone_tokens"] for rank in found.ranks} == {sum(given.values())}


@every
def test_every_gradient_equals_hugging_face(folder: Path, layout: Layout) -> None:
    errors = gradient_errors(folder, layout)
    assert max(errors.values()) < TOLERANCE, max(errors.items(), key=lambda item: item[1])


@every
def test_every_rank_reports_the_loss_and_norm_of_the_global_batch(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
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


@every
def test_steps_equal_torch_adamw_with_clipping(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    before, after, trained = expected.section("weight"), expected.section("trained"), found.section("trained")
    for name, reference in after.items():
        moved = (reference - before[name]).double().norm()
        error = (trained[name] - reference).double().norm()
        assert error < 1e-2 * moved, f"{name}: {error / moved:.1e} of the update"
    assert len({rank["trained"] for rank in found.ranks}) == 1


@every
def test_a_step_repeats_bitwise_from_the_same_state(folder: Path, layout: Layout) -> None:
    found, _ = outcome(folder, layout)
    assert [rank["repeats"] for rank in found.ranks] == [True] * layout.ranks


@every
def test_export_gives_the_loaded_weights_back_on_every_rank(folder: Path, layout: Layout) -> None:
    found, expected = outcome(folder, layout)
    weights, exported = expected.section("weight"), found.section("weight")
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(exported[name], weight), name
    first = found.ranks[0]
    for rank in found.ranks:
        assert (rank["order"], rank["exported"]) == (first["order"], first["exported"])


PADDED = [x for x in LAYOUTS if x.kind != "tied" and (x.config.context > 1 or x.config.sequence_parallel)]


@pytest.mark.parametrize("layout", PADDED, ids=[layout.name for layout in PADDED])
def test_pads_leave_no_gradient_in_their_embedding(folder: Path, layout: Layout) -> None:
    gradient = found_of(folder, layout.name).section("gradient")["model.embed_tokens.weight"]
    assert gradient[0].count_nonzero() == 0  # token 0 is in no document, and in every pad
    assert gradient[3:].count_nonzero() > 0


@every
def test_bytes_of_rank_0_reach_every_rank(folder: Path, layout: Layout) -> None:
    assert [rank["broadcast"] for rank in found_of(folder, layout.name).ranks] == [True] * layout.ranks


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_data_parallel_ranks_have_the_gradient_of_one(folder: Path, kind: str) -> None:
    alone = {"context": 1, "tensor": 1, "pipeline": 1}
    same = [x for x in LAYOUTS if x.kind == kind and not set(x.parallel) & set(alone) and x.data == x.ranks]
    assert {layout.data for layout in same} >= {1, 2, 4}
    norms = [found_of(folder, layout.name).ranks[0]["steps"][0][1] for layout in same]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-6)
    one, *others = (found_of(folder, layout.name).section("gradient") for layout in same)
    for other in others:
        for name, gradient in one.items():
            assert relative(other[name], gradient) < 4e-6, name


def test_bfloat16_trains_close_to_float32(folder: Path) -> None:
    exact, rounded = found_of(folder, "tied-one"), found_of(folder, "bf16")
    assert rounded.section("weight")["model.norm.weight"].dtype == torch.bfloat16
    for (loss, norm, _), (loss16, norm16, _) in zip(exact.ranks[0]["steps"], rounded.ranks[0]["steps"], strict=True):
        assert loss16 == pytest.approx(loss, abs=0.05)
        assert norm16 == pytest.approx(norm, rel=0.05)
    cosines = [
        torch.nn.functional.cosine_similarity(gradient.flatten(), rounded.section("gradient")[name].flatten(), dim=0)
        for name, gradient in exact.section("gradient").items()
    ]
    assert min(cosines) > 0.98


@pytest.mark.parametrize("name", [*sorted(SAVED), "bf16"])
def test_saved_folder_has_the_trained_weights_and_the_sources_other_files(folder: Path, name: str) -> None:
    source, saved = folder / "models" / ("moe" if name.startswith("moe") else "tied"), folder / "saved" / name
    assert {f.name for f in saved.iterdir()} == {f.name for f in source.iterdir()}
    for file in source.glob("*.json"):
        assert (saved / file.name).read_bytes() == file.read_bytes()
    weights = load_file(saved / "model.safetensors")
    trained = found_of(folder, name).section("trained")
    assert weights.keys() == trained.keys() == load_file(source / "model.safetensors").keys()
    for tensor, weight in trained.items():
        assert torch.equal(weights[tensor], weight), tensor
    assert not list((folder / "saved").glob(".*"))


def test_what_is_proven_is_written_down(folder: Path) -> None:
    rows = []
    for layout in LAYOUTS:
        repeats = all(rank["repeats"] for rank in found_of(folder, layout.name).ranks)
        error = max(gradient_errors(folder, layout).values())
        assert error < TOLERANCE and repeats
        rows.append(layout.cells | {"worst gradient error": f"{error:.1e}", "repeatable": "yes" if repeats else "no"})
    file = Path(os.environ.get("SLIPSTREAM_LAYOUTS") or folder / "layouts.json")
    file.write_text(json.dumps(rows, indent=1) + "\n")
