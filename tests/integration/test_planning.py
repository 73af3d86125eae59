"""The planner's arithmetic against real Megatron-Core on CPU ranks: groups, layers, parameters and bytes, exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.schema import ParallelConfig
from launch.plan.architecture import read_architecture
from launch.plan.arithmetic import checkpoint_bytes
from launch.plan.memory import resident
from launch.plan.parameters import chunk_parameters
from launch.plan.process_groups import DENSE, SPARSE, Sizes, rank_groups, stage_chunks
from tests.integration import fork_rig
from tests.integration.fork_rig import group

ROOT = Path(__file__).resolve().parents[2]
BOTH = ("float32", "bfloat16")


def measured(kind: str, ranks: int, dtypes: tuple[str, ...] = BOTH, **parallel: int) -> list[dict[str, Any]]:
    layout = "-".join(f"{name}{size}" for name, size in parallel.items()) or "one"
    return [
        {"name": f"{kind}-{layout}-x{ranks}-{d}", "kind": kind, "ranks": ranks, "dtype": d, "parallel": parallel}
        for d in dtypes
    ]


KINDS = ["qwen2", "qwen3", "llama", "mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v3-plain", "glm4-moe"]
MEASURED = [
    *measured("qwen3", 1),
    *measured("qwen3", 2, tensor=2),
    *measured("qwen3", 2, pipeline=2),  # a tied embedding on both stages, in buckets of its own
    *measured("qwen3", 2),
    *measured("qwen2", 2, pipeline=2, virtual_pipeline=2),
    *measured("llama", 4, tensor=2),
    *measured("mixtral", 2, expert=2),
    *measured("qwen3-moe", 4, pipeline=2, expert=2),
    *measured("qwen3-moe", 4, expert=2),
    *measured("qwen3-moe", 4, tensor=2, expert=2, expert_tensor=2, dtypes=("bfloat16",)),
    *measured("deepseek-v3", 4, tensor=2, pipeline=2, expert=2, dtypes=("bfloat16",)),
    *measured("deepseek-v3-plain", 2, tensor=2, dtypes=("float32",)),
    *measured("glm4-moe", 2, expert=2, dtypes=("bfloat16",)),
]
DENSE_TOKENS = {
    **{"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"},
    "data x context": "dp-cp",
}
SPARSE_TOKENS = {"expert_tensor": "tp", "expert": "ep", "expert_data": "dp"}
GROUPS = [
    {"name": "groups-0", "world": 16, "layers": 80, "parallel": {"tensor": 8, "pipeline": 2}},
    {
        "name": "groups-1",
        "world": 64,
        "layers": 12,
        "parallel": {"tensor": 2, "context": 2, "pipeline": 4, "expert": 4},
    },
    {
        **{"name": "groups-2", "world": 64, "layers": 61},
        "parallel": {"pipeline": 16, "expert": 2, "expert_tensor": 2, "first_stage_layers": 3, "last_stage_layers": 2},
    },
    {"name": "groups-3", "world": 16, "layers": 24, "parallel": {"tensor": 2, "pipeline": 4, "virtual_pipeline": 3}},
    {
        **{"name": "groups-4", "world": 8, "layers": 14},
        "parallel": {"pipeline": 4, "virtual_pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 4},
    },
    {"name": "groups-5", "world": 12, "layers": 5, "parallel": {"tensor": 2, "pipeline": 2, "last_stage_layers": 2}},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("planning")
    for name in ("models", "checkpoints"):
        (place / name).mkdir()
    groups = [{**spec, "dense": DENSE_TOKENS, "sparse": SPARSE_TOKENS} for spec in GROUPS]
    models = [{"kind": kind} for kind in KINDS]
    of_size = {n: [s for s in MEASURED if s["ranks"] == n] for n in (1, 2, 4)}
    worlds = [
        group(1, "model", models),
        group(1, "groups", groups),
        *(group(n, "measure", specs) for n, specs in of_size.items()),
    ]
    fork_rig.run("planning_workers", place, worlds)
    return place


def specs(of: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("spec", of, ids=[s["name"] for s in of])


@specs(GROUPS)
def test_groups_are_those_of_megatrons_rank_generator(folder: Path, spec: dict[str, Any]) -> None:
    sizes = Sizes.of(spec["world"], ParallelConfig(**spec["parallel"]))
    found = json.loads((folder / f"{spec['name']}.json").read_text())["groups"]
    for names, order in ((DENSE_TOKENS, DENSE), (SPARSE_TOKENS, SPARSE)):
        for name in names:
            ours = [list(group) for group in rank_groups(sizes, tuple(name.split(" x ")), order)]
            assert sorted(ours) == sorted(map(sorted, found[name])), name


@specs(GROUPS)
def test_stages_have_the_layers_that_megatron_gives_them(folder: Path, spec: dict[str, Any]) -> None:
    chunks = stage_chunks(spec["layers"], ParallelConfig(**spec["parallel"]))
    found = json.loads((folder / f"{spec['name']}.json").read_text())["chunks"]
    assert [[[r.start, r.stop] for r in stage] for stage in chunks] == found


@specs(MEASURED)
def test_every_rank_holds_the_parameters_and_bytes_that_are_planned(folder: Path, spec: dict[str, Any]) -> None:
    config = json.loads((folder / "models" / spec["kind"] / "config.json").read_text())
    model, parallel = read_architecture(config), ParallelConfig(**spec["parallel"])
    sizes = Sizes.of(spec["ranks"], parallel)
    chunks = stage_chunks(model.layers, parallel)
    ranks = [json.loads(file.read_text()) for file in sorted((folder / spec["name"]).glob("*.json"))]
    for stage, held in enumerate(resident(model, parallel, sizes, spec["dtype"])):
        mine = [rank for rank in ranks if rank["stage"] == stage]
        assert len(mine) == spec["ranks"] // parallel.pipeline
        for rank in mine:
            for v, (layers, chunk) in enumerate(zip(chunks[stage], rank["chunks"], strict=True)):
                first, last = stage == v == 0, (stage, v) == (parallel.pipeline - 1, parallel.virtual_pipeline - 1)
                planned = chunk_parameters(model, parallel, layers, first, last)
                assert sorted([p.name, p.elements] for p in planned) == sorted(chunk["named"])
            for what in ("parameters", "gradients"):
                assert sum(sum(chunk[what].values()) for chunk in rank["chunks"]) == getattr(held, what)
        assert max(rank["optimizer"] for rank in mine) == held.optimizer


def test_a_checkpoint_is_as_large_as_planned_but_for_names_and_offsets(folder: Path) -> None:
    more = {}
    for spec in [spec for spec in MEASURED if spec["ranks"] == 1]:
        config = json.loads((folder / "models" / spec["kind"] / "config.json").read_text())
        (rank,) = (json.loads(file.read_text()) for file in (folder / spec["name"]).glob("*.json"))
        more[spec["dtype"]] = rank["checkpoint"] - checkpoint_bytes(read_architecture(config), spec["dtype"])
    assert 0 < more["float32"] < 400_000  # the same for any sizes: about 2 kB for each of some 170 tensors
    assert abs(more["bfloat16"] - more["float32"]) < 1000
