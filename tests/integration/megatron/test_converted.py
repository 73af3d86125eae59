"""A converted folder gives every layout bitwise the weights of the Hugging Face folder that it was made of."""

import resource
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.config.converted import MANIFEST, WEIGHTS, config_digest, read_converted
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same, section
from tests.rigs.tiny_models import TEMPERATURE, exported, figures, microbatches, share

BIAS = "e_score_correction_bias"
KINDS = [
    "tied", "untied", "qwen2", "llama", "mistral", "mixtral", "moe", "deepseek-v3", "deepseek-v3-plain", "glm",
]  # fmt: skip
HALVED = ["tied", "moe", "deepseek-v3"]  # also in files of bfloat16
TP2, PP2, CP2, EP2 = ({name: 2} for name in ("tensor", "pipeline", "context", "expert"))
VPP2 = PP2 | {"virtual_pipeline": 2}


def case(kind: str, ranks: int = 0, dtype: str = "float32", **parallel: int) -> dict[str, Any]:
    sizes = [f"{name}{size}" for name, size in parallel.items()] or ["one"]
    name = "-".join([kind, *sizes, *[f"data{ranks}"] * bool(ranks), *[dtype] * (dtype != "float32")])
    return {"name": name, "kind": kind, "ranks": ranks, "dtype": dtype, "parallel": parallel}


SPECS = [
    *(case(kind) for kind in KINDS),
    *(case("tied", **layout) for layout in (TP2, PP2, VPP2, CP2, TP2 | PP2, TP2 | VPP2)),
    case("tied", ranks=2), case("untied", tensor=4), case("untied", **PP2, last_stage_layers=3),
    case("qwen2", **TP2), case("llama", **TP2), case("mistral", **PP2), case("mixtral", **TP2), case("mixtral", **EP2),
    case("moe", **EP2), case("moe", expert=4), case("moe", **TP2, **EP2), case("moe", expert_tensor=2, **EP2),
    case("moe", **VPP2, **EP2), case("moe", ranks=4, **EP2),
    case("deepseek-v3", **TP2), case("deepseek-v3", **PP2), case("deepseek-v3", **EP2),
    case("deepseek-v3-plain", **TP2), case("glm", **PP2), case("glm", **EP2),
    case("tied", ranks=8, **TP2, **PP2, **CP2), case("moe", ranks=8, **TP2, **PP2, **EP2),
    # a type that is not the files'
    case("tied", dtype="bfloat16", **TP2), case("deepseek-v3", dtype="bfloat16"), case("moe", dtype="bfloat16", **EP2),
    *(case(f"{kind}-half", dtype="bfloat16") for kind in HALVED),
    case("tied-half"), case("tied-half", dtype="bfloat16", **TP2, **PP2), case("moe-half", dtype="bfloat16", **EP2),
    case("deepseek-v3-half", **EP2),
]  # fmt: skip
for spec in SPECS:
    spec["verify"] = spec["name"] in ("tied-one", "moe-expert2", "tied-half-one", "tied-half-one-bfloat16")
REFERENCES = [case("tied"), case("tied", **TP2, **PP2), case("tied", **VPP2), case("tied", dtype="bfloat16")]
FIRST = [case("tied"), case("tied", **VPP2), case("untied", **TP2), case("deepseek-v3", **TP2), case("glm", **EP2)]
RESUMED = [case("tied"), case("tied", dtype="bfloat16", **TP2), case("tied", **VPP2), case("moe", **EP2)]
RESUMED += [case("tied", ranks=2)]


def in_bfloat16(model: Any) -> Any:
    """The model as real folders have it: what routers select by stays float32."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)}
    model.bfloat16()
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return model


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    """Hugging Face folders of every kind."""
    models = folder / "models"
    for kind in KINDS:
        tiny_models.save(tiny_models.new_model(kind), models / kind)
    for kind in HALVED:
        tiny_models.save(in_bfloat16(tiny_models.new_model(kind)), models / f"{kind}-half")
    tiny_models.save(tiny_models.new_model("tied", seed=7), models / "tied-other")


def job_convert(folder: Path, spec: dict[str, Any]) -> None:
    """FOLDER/models/KIND-converted of each."""
    from common.config.schema import ParallelConfig
    from learner.megatron import parallel
    from learner.megatron.conversion.convert import convert

    parallel.initialize(ParallelConfig(), seed=0, timeout_s=60.0)
    for source in sorted((folder / "models").iterdir()):
        convert(source, source.with_name(f"{source.name}-converted"))


def job_full_disk(folder: Path, spec: dict[str, Any]) -> None:
    """A file system that refuses the weights, then one that takes them."""
    from common.config.schema import ParallelConfig
    from learner.megatron import parallel
    from learner.megatron.conversion.convert import convert

    parallel.initialize(ParallelConfig(), seed=0, timeout_s=60.0)
    source, target = folder / "models" / "tied", folder / "full" / "made"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # writing more is an OSError
    said = tiny_models.refusal(convert, source, target, False)  # the forward check writes a miniature
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = [path.name for path in target.parent.iterdir()]
    convert(source, target)
    forked_ranks.write(folder / "full-disk", 0, {}, {"said": said, "left": left})


def everything(backend: Any) -> dict[str, Tensor]:
    """Copies of the parameters, the buffers and the optimizer's main parameters of this rank."""
    from learner.megatron.optimizer import gather_parameters

    gather_parameters(backend.chunks)  # otherwise the next forward pass does
    found = {f"main.{i}": parameter for i, (parameter, _) in enumerate(tiny_models.main_parameters(backend))}
    for i, chunk in enumerate(backend.chunks):
        tensors = [*chunk.module.named_parameters(), *chunk.module.named_buffers()]
        found |= {f"{i}.{name}": tensor for name, tensor in tensors}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def job_load(folder: Path, spec: dict[str, Any]) -> None:
    """Both folders under one layout, compared on every rank."""
    from megatron.core import parallel_state

    found = []
    for kind in (spec["kind"], f"{spec['kind']}-converted"):
        if found:
            parallel_state.destroy_model_parallel()
        backend = tiny_models.backend(folder, spec | {"kind": kind})
        outputs = exported(backend, "weight") | tiny_models.logprobs(backend)
        found.append(everything(backend) | outputs)
    one, other = found
    same_names = one.keys() == other.keys()
    wrong = [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]
    forked_ranks.write(folder / spec["name"], backend.rank, outputs, {"wrong": wrong, "same_names": same_names})


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """The same reference from both kinds of folder, for a policy from a converted one."""
    from megatron.core import parallel_state

    result: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, reference in (("plain", "tied-other"), ("converted", "tied-other-converted"), ("itself", None)):
        if result:
            parallel_state.destroy_model_parallel()
        backend = tiny_models.backend(folder, spec | {"kind": "tied-converted", "reference": reference})
        figures(backend, 0)
        before = everything(backend)
        rows = backend.reference_logprobs(share(backend, microbatches(0)), TEMPERATURE)
        tensors |= tiny_models.numbered(backend, rows, name)
        after = everything(backend)
        result[name] = [key for key in before if not torch.equal(before[key], after[key])]
    forked_ranks.write(folder / f"reference-{spec['name']}", backend.rank, tensors, result)


def poisoned(weight: Tensor) -> None:
    weight.data.fill_(float("nan"))


def job_first_values(folder: Path, spec: dict[str, Any]) -> None:
    """Loads of both folders after a parameter's first values were made unusable."""
    from megatron.core import parallel_state

    from learner.megatron import start_weights
    from learner.megatron.conversion import model as building

    load, unusable, left = start_weights.load, [], []

    def watched(path: Path, model: Any, layout: Any) -> None:
        unusable.append(sum(int(p.isnan().any()) for chunk in model.chunks for p in chunk.parameters()))
        load(path, model, layout)

    for kind in (spec["kind"], f"{spec['kind']}-converted"):
        if unusable:
            parallel_state.destroy_model_parallel()
        with patch.object(building, "_leave", poisoned), patch.object(start_weights, "load", watched):
            backend = tiny_models.backend(folder, spec | {"kind": kind})
        left += [name for name, tensor in everything(backend).items() if not tensor.isfinite().all()]
    forked_ranks.write(folder / f"first-{spec['name']}", backend.rank, {}, {"unusable": unusable, "left": left})


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps and a checkpoint; then a backend that reads the checkpoint alone, from unusable first values."""
    from megatron.core import parallel_state

    from learner.megatron import start_weights
    from learner.megatron.conversion import model as building

    spec = spec | {"verify": True}
    backend = tiny_models.backend(folder, spec)
    path = folder / "checkpoints" / spec["name"]
    figures(backend, 0)
    tiny_models.save_checkpoint(backend, path)
    steps = [figures(backend, 1)]
    expected = everything(backend)
    parallel_state.destroy_model_parallel()
    with patch.object(building, "_leave", poisoned), patch.object(start_weights, "load") as load:
        backend = tiny_models.backend(folder, spec | {"resumes": torch.distributed.get_rank() == 0})
    backend.load_checkpoint(path)
    steps.append(figures(backend, 1))
    found = everything(backend)
    wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
    result = {"steps": steps, "wrong": wrong, "loads": load.call_count}
    forked_ranks.write(folder / f"resumed-{spec['name']}", backend.rank, {}, result)


DAMAGED = [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]


def job_damaged(folder: Path, spec: dict[str, Any]) -> None:
    """The messages about files with other bytes, and about another model's weights."""
    from megatron.core import parallel_state

    models, said = folder / "models", {}
    for name in DAMAGED:
        shutil.copytree(models / "tied-converted", models / f"damaged-{name}")
        file = models / f"damaged-{name}" / WEIGHTS / name
        file.write_bytes(bytes(file.stat().st_size))
    mixed = models / "damaged-mixed"
    shutil.copytree(models / "untied-converted", mixed)
    shutil.rmtree(mixed / WEIGHTS)
    shutil.copytree(models / "tied-converted" / WEIGHTS, mixed / WEIGHTS)
    made = read_converted(models / "untied-converted")
    files = read_converted(models / "tied-converted").files
    manifest = msgspec.structs.replace(made, files=files, config=config_digest(mixed))
    (mixed / WEIGHTS / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for name in [*DAMAGED, "mixed"]:
        said[name] = tiny_models.refusal(tiny_models.backend, folder, {"kind": f"damaged-{name}"})
        parallel_state.destroy_model_parallel()
    forked_ranks.write(folder / "damaged", 0, {}, said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(job_models, [{}]),
        group(job_convert, [{}]),
        group(job_load, SPECS, shared=True),
        group(job_reference, REFERENCES, shared=True),
        group(job_first_values, FIRST, shared=True),
        group(job_resume, RESUMED, shared=True),
        group(job_damaged, [{"name": "damaged"}], shared=True),
        group(job_full_disk, [{"name": "full-disk"}], shared=True),
    )


@forked_ranks.named(SPECS)
def test_every_layout_has_bitwise_the_weights_that_it_has_from_safetensors(folder: Path, spec: dict[str, Any]) -> None:
    outcome = Outcome(folder / spec["name"])
    for rank in outcome.ranks:
        assert rank == {"wrong": [], "same_names": True}
    source = load_file(folder / "models" / spec["kind"] / "model.safetensors")
    dtype = getattr(torch, spec["dtype"])
    expected = {name: tensor.float() if name.endswith(BIAS) else tensor.to(dtype) for name, tensor in source.items()}
    for tensors in outcome.tensors_of:
        same(section(tensors, "weight"), expected)


@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind}-half" for kind in HALVED)])
def test_the_folder_has_the_companions_and_weights_of_the_type_that_keeps_them(folder: Path, kind: str) -> None:
    source, target = folder / "models" / kind, folder / "models" / f"{kind}-converted"
    made = read_converted(target)
    assert made.dtype == ("bfloat16" if kind.endswith("half") else "float32")
    assert made.names == sorted(load_file(source / "model.safetensors"))
    companions = {file.name for file in source.iterdir()} - {"model.safetensors"}
    assert {file.name for file in target.iterdir()} == companions | {WEIGHTS}
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in companions)
    size = (source / "model.safetensors").stat().st_size
    assert 0 < made.weight_bytes - size < 2 << 20
    assert made.forward is not None and made.forward.rounding > 0 and len(made.forward.logprobs) == 136
    assert not list(target.parent.glob(".*")), "nothing is left beside it"


@forked_ranks.named(REFERENCES)
def test_a_converted_reference_is_the_reference_and_leaves_the_policy_as_it_is(
    folder: Path, spec: dict[str, Any]
) -> None:
    outcome = Outcome(folder / f"reference-{spec['name']}")
    same(outcome.section("converted"), outcome.section("plain"))
    other = outcome.section("itself")
    assert max((other[name] - row).abs().max() for name, row in outcome.section("plain").items()) > 0.1
    assert all(rank == {"plain": [], "converted": [], "itself": []} for rank in outcome.ranks)


@forked_ranks.named(FIRST)
def test_no_parameter_keeps_its_first_value(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / f"first-{spec['name']}").ranks:
        assert len(rank["unusable"]) == 2 and min(rank["unusable"]) >= 4, "the poison reached the parameters"
        assert rank["left"] == []


@forked_ranks.named(RESUMED)
def test_a_resume_reads_the_checkpoint_alone_and_goes_on_bitwise(folder: Path, spec: dict[str, Any]) -> None:
    for rank in Outcome(folder / f"resumed-{spec['name']}").ranks:
        went_on, came_back = rank["steps"]
        assert went_on == came_back
        assert (rank["wrong"], rank["loads"]) == ([], 0)


@pytest.mark.parametrize("name", [*DAMAGED, "mixed"])
def test_damaged_weights_and_those_of_another_model_are_refused_by_name(folder: Path, name: str) -> None:
    (said,) = Outcome(folder / "damaged").ranks
    assert str(folder / "models" / f"damaged-{name}" / WEIGHTS) in said[name]


def test_a_full_disk_leaves_nothing_and_the_next_conversion_works(folder: Path) -> None:
    (found,) = Outcome(folder / "full-disk").ranks
    assert "File too large" in found["said"] and found["left"] == []
    read_converted(folder / "full" / "made")
