"""The planner's arithmetic against real Megatron-Core on CPU ranks: groups, layers, parameters and bytes, exactly."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.architecture import read_architecture
from common.config.lora import LoraConfig
from common.config.schema import ParallelConfig
from launch.plan.job_plan import checkpoint_bytes
from launch.plan.layout import DENSE, SPARSE, Sizes, chunk_parameters, rank_groups, stage_chunks
from launch.plan.memory import resident
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group

FLOAT32, BFLOAT16 = ("float32",), ("bfloat16",)
BOTH = FLOAT32 + BFLOAT16


def measured(
    kind: str, ranks: int, dtypes: tuple[str, ...] = BOTH, lora: dict[str, Any] | None = None, **parallel: int
) -> list[dict[str, Any]]:
    layout = "-".join(f"{name}{size}" for name, size in parallel.items()) or "one"
    layout += "-lora" if lora else ""
    shared = {"kind": kind, "ranks": ranks, "parallel": parallel, "lora": lora}
    return [shared | {"name": f"{kind}-{layout}-x{ranks}-{d}", "dtype": d} for d in dtypes]


# Both types where no parallelism cuts the model, replicas share states, or experts are cut; one of them elsewhere.
MEASURED = [
    *measured("tied", 1),
    *measured("tied", 2, FLOAT32, tensor=2),
    *measured("tied", 2, BFLOAT16, pipeline=2),  # a tied embedding on both stages, in buckets of its own
    *measured("tied", 2),
    *measured("qwen2-deep", 2, FLOAT32, pipeline=2, virtual_pipeline=2),
    *measured("llama", 4, BFLOAT16, tensor=2),
    *measured("mixtral", 2, expert=2),
    *measured("moe", 4, FLOAT32, pipeline=2, expert=2),
    *measured("moe", 4, BFLOAT16, expert=2),
    *measured("moe", 4, BFLOAT16, tensor=2, expert=2, expert_tensor=2),
    *measured("deepseek-v3-deep", 4, BFLOAT16, tensor=2, pipeline=2, expert=2),
    *measured("deepseek-v3-plain", 2, FLOAT32, tensor=2),
    *measured("glm", 2, BFLOAT16, expert=2),
    *measured("tied", 1, lora={"rank": 6}),
    *measured("qwen2", 4, FLOAT32, tensor=2, lora={"rank": 6}),
    *measured("tied-deep", 2, BFLOAT16, pipeline=2, virtual_pipeline=2, lora={"rank": 2, "targets": ["linear_fc1"]}),
]
DENSE_TOKENS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp", "data x context": "dp-cp"}
SPARSE_TOKENS = {"expert_tensor": "tp", "expert": "ep", "expert_data": "dp"}
DEEPSEEK = {"pipeline": 16, "expert": 2, "expert_tensor": 2, "first_stage_layers": 3, "last_stage_layers": 2}
CUTS: list[tuple[int, int, dict[str, int]]] = [  # ranks, layers, layout
    (16, 80, {"tensor": 8, "pipeline": 2}),
    (64, 12, {"tensor": 2, "context": 2, "pipeline": 4, "expert": 4}),
    (64, 61, DEEPSEEK),
    (16, 24, {"tensor": 2, "pipeline": 4, "virtual_pipeline": 3}),
    (8, 14, {"pipeline": 4, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 4}),
    (12, 5, {"tensor": 2, "pipeline": 2, "last_stage_layers": 2}),
]
GROUPS = [
    {"name": f"groups-{i}", "ranks": 1, "world": world, "layers": layers, "parallel": parallel}
    for i, (world, layers, parallel) in enumerate(CUTS)
]


def job_measure(folder: Path, spec: dict[str, Any]) -> None:
    """This rank's parameters by name, and the bytes of its buffers and optimizer states after one step."""
    from megatron.core import parallel_state as mpu

    backend = tiny_models.backend(folder, spec)
    tiny_models.step(backend, 0)
    result: dict[str, Any] = {"stage": mpu.get_pipeline_model_parallel_rank(), "chunks": []}
    for chunk in backend.chunks:
        named = [[name, parameter.numel()] for name, parameter in chunk.module.named_parameters()]
        buffers = {"dense": chunk.buffers, "experts": chunk.expert_parallel_buffers}
        parameters = {k: sum(b.param_data.nbytes for b in v) for k, v in buffers.items()}
        parameters["frozen"] = sum(p.nbytes for p in chunk.module.parameters() if not p.requires_grad)
        gradients = {k: sum(b.grad_data.nbytes for b in v) for k, v in buffers.items()}
        result["chunks"].append({"named": named, "parameters": parameters, "gradients": gradients})
    result["optimizer"] = sum(optimizer_bytes(o) for o in backend.optimizer.megatron.chained_optimizers)
    if spec["ranks"] == 1:
        path = folder / "checkpoints" / spec["name"]
        tiny_models.save_checkpoint(backend, path)
        result["checkpoint"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    forked_ranks.write(folder / spec["name"], backend.rank, {}, result)


def optimizer_bytes(optimizer: Any) -> int:
    """Adam's two states, and the main parameters that are not views of the model's."""
    if optimizer.optimizer is None:  # no parameters of this kind on the rank
        return 0
    states = [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    mains = [p for group in optimizer.shard_fp32_from_float16_groups for p in group if p is not None]
    return sum(tensor.nbytes for tensor in [*states, *mains])


def job_groups(folder: Path, spec: dict[str, Any]) -> None:
    """Megatron's own rank groups and layers, from functions that need no process group."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    p, world = ParallelConfig(**spec["parallel"]), spec["world"]
    data, expert_data = world // p.model_ranks, world // (p.pipeline * p.expert * p.expert_tensor)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=p.tensor, ep=1, dp=data, pp=p.pipeline, cp=p.context, order=order)
    sparse = RankGenerator(tp=p.expert_tensor, ep=p.expert, dp=expert_data, pp=p.pipeline, cp=1, order=order)
    groups = {name: dense.get_ranks(token) for name, token in DENSE_TOKENS.items()}
    groups |= {name: sparse.get_ranks(token) for name, token in SPARSE_TOKENS.items()}
    virtual = p.virtual_pipeline if p.virtual_pipeline > 1 else None
    config = SimpleNamespace(
        **dict(num_layers=spec["layers"], pipeline_model_parallel_layout=None),
        **dict(pipeline_model_parallel_size=p.pipeline, virtual_pipeline_model_parallel_size=virtual),
        **dict(num_layers_in_first_pipeline_stage=p.first_stage_layers),
        **dict(num_layers_in_last_pipeline_stage=p.last_stage_layers),
        **dict(account_for_embedding_in_pipeline_split=False, account_for_loss_in_pipeline_split=False),
    )
    chunks = []
    for stage in range(p.pipeline):
        chunks.append([])
        for v in range(p.virtual_pipeline):
            at = get_transformer_layer_offset(config, v if virtual else None, stage)
            size = get_num_layers_to_build(config, v if virtual else None, stage)
            chunks[-1].append([at, at + size])
    forked_ranks.write(folder / spec["name"], 0, {}, {"groups": groups, "chunks": chunks})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(tiny_models.job_models, [{"kinds": sorted({spec["kind"] for spec in MEASURED})}]),
        group(job_groups, GROUPS, shared=True),
        group(job_measure, MEASURED, shared=True),
    )


def lora_of(spec: dict[str, Any]) -> LoraConfig | None:
    return LoraConfig(**spec["lora"]) if spec["lora"] else None


def model_of(folder: Path, spec: dict[str, Any]) -> Any:
    return read_architecture(json.loads((folder / "models" / spec["kind"] / "config.json").read_text()))


@forked_ranks.named(GROUPS)
def test_groups_and_the_layers_of_stages_are_those_of_megatron(folder: Path, spec: dict[str, Any]) -> None:
    parallel = ParallelConfig(**spec["parallel"])
    sizes, (found,) = Sizes.of(spec["world"], parallel), Outcome(folder / spec["name"]).ranks
    for names, order in ((DENSE_TOKENS, DENSE), (SPARSE_TOKENS, SPARSE)):
        for name in names:
            ours = [list(group) for group in rank_groups(sizes, tuple(name.split(" x ")), order)]
            assert sorted(ours) == sorted(map(sorted, found["groups"][name])), name
    chunks = stage_chunks(spec["layers"], parallel)
    assert [[[r.start, r.stop] for r in stage] for stage in chunks] == found["chunks"]


@forked_ranks.named(MEASURED)
def test_every_rank_holds_the_parameters_and_bytes_that_are_planned(folder: Path, spec: dict[str, Any]) -> None:
    model, parallel = model_of(folder, spec), ParallelConfig(**spec["parallel"])
    sizes = Sizes.of(spec["ranks"], parallel)
    chunks = stage_chunks(model.layers, parallel)
    ranks = Outcome(folder / spec["name"]).ranks
    for stage, held in enumerate(resident(model, parallel, sizes, spec["dtype"], lora_of(spec))):
        mine = [rank for rank in ranks if rank["stage"] == stage]
        assert len(mine) == spec["ranks"] // parallel.pipeline
        for rank in mine:
            for v, (layers, chunk) in enumerate(zip(chunks[stage], rank["chunks"], strict=True)):
                first, last = stage == v == 0, (stage, v) == (parallel.pipeline - 1, parallel.virtual_pipeline - 1)
                planned = chunk_parameters(model, parallel, layers, first, last, lora_of(spec))
                assert sorted([p.name, p.elements] for p in planned) == sorted(chunk["named"])
            for what in ("parameters", "gradients"):
                assert sum(sum(chunk[what].values()) for chunk in rank["chunks"]) == getattr(held, what)
        assert max(rank["optimizer"] for rank in mine) == held.optimizer


def test_a_checkpoint_is_as_large_as_planned_but_for_names_and_offsets(folder: Path) -> None:
    more = {}
    for spec in [spec for spec in MEASURED if spec["ranks"] == 1]:
        (rank,) = Outcome(folder / spec["name"]).ranks
        planned = checkpoint_bytes(model_of(folder, spec), spec["dtype"], lora_of(spec))
        more[spec["dtype"], bool(spec["lora"])] = rank["checkpoint"] - planned
    for lora in (False, True):
        assert 0 < more["float32", lora] < 400_000  # the same for any sizes: about 2 kB for each of some 170 tensors
        assert abs(more["bfloat16", lora] - more["float32", lora]) < 1000
