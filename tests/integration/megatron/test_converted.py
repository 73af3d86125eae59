"""A converted folder gives every layout bitwise the weights of the Hugging Face folder that it was made of.

Parameters begin as NaN, so that one that nothing loads is found. Each layout is here for something of its own:

    tied-one                       one rank, its forward pass too
    llama-deep-pipeline2-...       stages of unequal depth, and an output layer of its own
    qwen2-tensor2                  biases cut by tensor parallelism
    tied-deep-tensor2-...          pieces of virtual stages, cut matrices, an embedding on two stages
    tied-half-context2-bfloat16    copies over context ranks, sharded main parameters
    moe-expert2, moe-tensor2-...   whole experts, beside attention that is cut
    moe-deep-pipeline2-...         experts of virtual stages
    moe-expert_tensor2-...         experts that are cut
    moe-half-expert2-bfloat16      experts of another type than Adam's
    deepseek-v3, -plain, glm       latent attention, dense layers, selection biases in float32, cut and spread
    -bfloat16, -half               a type that is not the files', in both directions
"""

import json
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
from common.process.files import pretty_json
from learner.checkpoint.folder import MODEL_FOLDER
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same, section
from tests.rigs.tiny_models import TEMPERATURE, exported, figures, microbatches, share

BIAS = "e_score_correction_bias"
KINDS = ["tied", "tied-deep", "qwen2", "llama-deep", "moe", "moe-deep", "deepseek-v3", "deepseek-v3-plain", "glm"]
HALVED = ["tied", "moe", "deepseek-v3"]  # also in files of bfloat16
CHECKED = ["tied", "moe", "tied-half"]  # converted with the forward check
TP2, PP2, CP2, EP2 = ({name: 2} for name in ("tensor", "pipeline", "context", "expert"))
VPP2 = PP2 | {"virtual_pipeline": 2}


def case(kind: str, ranks: int = 0, dtype: str = "float32", **parallel: int) -> dict[str, Any]:
    sizes = [f"{name}{size}" for name, size in parallel.items()] or ["one"]
    name = "-".join([kind, *sizes, *[f"data{ranks}"] * bool(ranks), *[dtype] * (dtype != "float32")])
    return {"name": name, "kind": kind, "ranks": ranks, "dtype": dtype, "parallel": parallel}


SPECS = [
    case("tied"), case("tied-deep", **TP2, **VPP2), case("qwen2", **TP2),
    case("llama-deep", **PP2, last_stage_layers=3), case("moe", **EP2), case("moe", **TP2, **EP2),
    case("moe", expert_tensor=2, **EP2), case("moe-deep", **VPP2, **EP2),
    case("deepseek-v3", **TP2, **EP2), case("deepseek-v3", **PP2), case("deepseek-v3-plain", **TP2),
    case("glm", **EP2),
    case("tied", dtype="bfloat16", **TP2), case("deepseek-v3", dtype="bfloat16"),
    case("tied-half"), case("tied-half", dtype="bfloat16", **CP2), case("moe-half", dtype="bfloat16", **EP2),
    case("deepseek-v3-half"),
]  # fmt: skip
for spec in SPECS:
    spec["verify"] = spec["name"] in ("tied-one", "moe-expert2", "tied-half-one")
REFERENCES = [case("tied", **PP2), case("tied", dtype="bfloat16")]
RESUMED = [case("tied-deep", dtype="bfloat16", **VPP2) | {"verify": True}, case("moe", **EP2)]
MIXED = {"name": "mixed-kinds", "parallel": TP2}
ADAPTER = {"kind": "tied-converted", "lora": {"rank": 2}}


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
    """FOLDER/models/KIND-converted of each, some with the forward check."""
    from common.config.schema import ParallelConfig
    from learner.megatron import parallel
    from learner.megatron.conversion.convert import convert

    parallel.initialize(ParallelConfig(), seed=0, timeout_s=60.0)
    for source in sorted((folder / "models").iterdir()):
        convert(source, source.with_name(f"{source.name}-converted"), source.name in CHECKED)


def job_full_disk(folder: Path, spec: dict[str, Any]) -> None:
    """A file system that refuses the weights, then one that takes them."""
    from common.config.schema import ParallelConfig
    from learner.megatron import parallel
    from learner.megatron.conversion.convert import convert

    parallel.initialize(ParallelConfig(), seed=0, timeout_s=60.0)
    source, target = folder / "models" / "tied", folder / "full" / "made"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # writing more is an OSError
    said = tiny_models.refusal(convert, source, target, False)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = [path.name for path in target.parent.iterdir()]
    convert(source, target, False)
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


def poisoned(weight: Tensor) -> None:
    weight.data.fill_(float("nan"))


def job_load(folder: Path, spec: dict[str, Any]) -> None:
    """Both folders under one layout, compared on every rank; parameters begin as NaN."""
    from megatron.core import parallel_state

    from learner.megatron import start_weights
    from learner.megatron.conversion import model as building

    load, unusable, found, weights = start_weights.load, [], [], {}

    def watched(path: Path, model: Any, layout: Any) -> None:
        unusable.append(sum(int(p.isnan().any()) for chunk in model.chunks for p in chunk.parameters()))
        load(path, model, layout)

    for kind in (spec["kind"], f"{spec['kind']}-converted"):
        if found:
            parallel_state.destroy_model_parallel()
        with patch.object(building, "_leave", poisoned), patch.object(start_weights, "load", watched):
            backend = tiny_models.backend(folder, spec | {"kind": kind})
        weights = exported(backend, "weight")
        found.append(everything(backend) | weights)
    one, other = found
    result = {
        "same_names": one.keys() == other.keys(),
        "wrong": [n for n in one if one[n].dtype != other[n].dtype or not torch.equal(one[n], other[n])],
        "left": [name for each in found for name, tensor in each.items() if not tensor.isfinite().all()],
        "unusable": unusable,
    }
    forked_ranks.write(folder / spec["name"], backend.rank, weights, result)


def job_other_kind(folder: Path, spec: dict[str, Any]) -> None:
    """Ranks of two machines: only the second one has the folder that was converted."""
    rank = torch.distributed.get_rank()
    said = tiny_models.refusal(tiny_models.backend, folder, spec | {"kind": "tied-converted" if rank else "tied"})
    forked_ranks.write(folder / spec["name"], rank, {}, {"said": said})


def job_adapter(folder: Path, spec: dict[str, Any]) -> None:
    """The adapters of a run whose model.path is a converted folder, as `slipstream export --adapter` writes them."""
    from learner.checkpoint import export_main
    from learner.megatron import parallel

    run = folder / "run"
    checkpoint = run / "checkpoints" / "step-1"
    checkpoint.mkdir(parents=True)
    tiny_models.save_checkpoint(tiny_models.backend(folder, ADAPTER), checkpoint / MODEL_FOLDER)
    parallel.mpu.destroy_model_parallel()
    document = {
        "run": {"name": "adapters", "dir": str(run), "steps": 1},
        "model": {"path": str(folder / "models" / ADAPTER["kind"]), "dtype": "float32"},
        "tasks": {"environment": "addition", "dataset": "unset"},
        "learner": {"lora": ADAPTER["lora"]},
    }
    (run / "config.yaml").write_bytes(pretty_json(document))  # JSON is YAML
    words = ["--config", str(run / "config.yaml"), "--checkpoint", str(checkpoint), "--out", str(folder / "adapter")]
    with patch.object(parallel, "shutdown"):  # the world goes on
        export_main.run([*words, "--adapter"])


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


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps and a checkpoint; then a backend that reads the checkpoint alone, from unusable first values."""
    from megatron.core import parallel_state

    from learner.megatron import start_weights
    from learner.megatron.conversion import model as building

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
    shutil.copytree(models / "llama-deep-converted", mixed)
    shutil.rmtree(mixed / WEIGHTS)
    shutil.copytree(models / "tied-converted" / WEIGHTS, mixed / WEIGHTS)
    made = read_converted(models / "llama-deep-converted")
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
        group(job_resume, RESUMED, shared=True),
        group(job_damaged, [{"name": "damaged"}], shared=True),
        group(job_full_disk, [{"name": "full-disk"}], shared=True),
        group(job_other_kind, [MIXED], shared=True),
        group(job_adapter, [{"name": "adapter"}]),
    )


@forked_ranks.named(SPECS)
def test_every_layout_has_bitwise_the_weights_that_it_has_from_safetensors(folder: Path, spec: dict[str, Any]) -> None:
    outcome = Outcome(folder / spec["name"])
    for rank in outcome.ranks:
        assert (rank["wrong"], rank["same_names"], rank["left"]) == ([], True, [])
        assert len(rank["unusable"]) == 2 and min(rank["unusable"]) >= 4, "the parameters began as NaN"
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
    assert (made.forward is not None) == (kind in CHECKED)
    assert made.forward is None or (made.forward.rounding > 0 and len(made.forward.logprobs) == 136)
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


def test_ranks_that_find_different_kinds_of_folders_all_refuse_at_once(folder: Path) -> None:
    """Else they wait in different collectives until learner.timeout_s is over."""
    outcome = Outcome(folder / MIXED["name"])
    for rank, kind in zip(outcome.ranks, ("tied", "tied-converted"), strict=True):
        assert str(folder / "models" / kind) in rank["said"] and "ranks 1 " in rank["said"]


def test_exported_adapters_of_a_converted_model_name_the_folder_that_it_was_made_of(folder: Path) -> None:
    told = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(folder / "models" / "tied")
