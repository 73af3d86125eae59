"""How long a checkpoint stops the ranks, by the size of the model and the number of data-parallel ranks.

    python bench/checkpoint_stall.py [--ranks 1 2 4] [--hidden 128 512] [--rounds 3]

One world of real ranks a size, in bfloat16 with float32 states. In turns in each world:

- own: each rank writes the states that it has, and a share of the weights;
- gathered: Megatron gathers the states over gloo to one rank of each data-parallel group, as Slipstream once did.

`stall_s` is from the call to the return of `start_checkpoint` on the slowest rank, after a barrier. `lead_cpu_s` is the
CPU of rank 0 in it, `cpu_s` that of all ranks. `lead_gib` is what rank 0 writes. The first save of each way does not
count. More ranks than cores share them, so compare the ways. `load_s` and `load_cpu_s` are of loading the last
checkpoint of `own` on the slowest rank.

The rows `large` compute the stall of large models. A rank plans what it writes, and rank 0 puts all plans together.
Their CPU for each entry of the index, `item_us` and `merge_us`, is measured with a deep narrow model. A rank copies 14
bytes for each of its parameters. `--copy-gb-s`, from a device to host memory that is not pinned, is an
assumption. The stall of `gathered` is the measured one for each GiB of states of a data-parallel group.
"""

import math
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness
import numpy as np

WAYS = ("own", "gathered")
LAYERS, VOCABULARY = 8, 4096
MANY = 9999  # so many tensors are experts, which belong to one shard each; others are in all shards
GIB = 2**30
# name: parameters, tensors, model-parallel ranks, ranks
LARGE = {
    "8B, 8 ranks": (8.2e9, 399, 1, 8),
    "8B, 64 ranks": (8.2e9, 399, 1, 64),
    "70B, 64 ranks": (70.6e9, 723, 8, 64),
    "70B, 512 ranks": (70.6e9, 723, 8, 512),
    "671B, 1024 ranks": (671e9, 46000, 64, 1024),
}


def rank_work(rank: int, folder: str, rounds: int, pipe: Connection) -> None:
    """One rank of a world: both ways in turns, then a load; sends its figures."""
    import torch

    from common.config.schema import LearnerConfig, ModelConfig
    from learner.batch.packing import Document, build
    from learner.loss.losses import cross_entropy
    from learner.megatron.backend import MegatronBackend, parallel
    from tests.rigs.gathered_states import gathered

    torch.set_num_threads(1)
    backend = MegatronBackend(ModelConfig(path=f"{folder}/model", dtype="bfloat16", verify=False), LearnerConfig(), 99)
    row = np.arange(3, 20, dtype=np.int32)
    backend.train_step(build([Document(row, np.ones(len(row), dtype=np.uint8))], [[0]]), cross_entropy)

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def save(way: str, number: int) -> dict[str, float]:
        path = Path(folder) / way
        parallel.barrier()
        merging.clear()
        cpu_began, began = cpu(), time.perf_counter()
        if way == "own":
            backend.start_checkpoint(path)
        else:
            with gathered(backend):
                backend.start_checkpoint(path)
        found = {"stall_s": time.perf_counter() - began, "cpu_s": cpu() - cpu_began}
        found["merge_s"] = sum(merging)
        backend.checkpoint_done(wait=True)
        found["gib"] = sum(each.stat().st_size for each in path.glob(f"__{rank}_*")) / GIB
        return found

    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from torch.distributed import distributed_c10d

    merging: list[float] = []  # CPU of rank 0 in the last save
    for owner, name in ((distributed_c10d, "_tensor_to_object"), (MCoreSavePlanner, "create_global_plan")):
        setattr(owner, name, counted(getattr(owner, name), merging))

    found: dict[str, Any] = {way: [] for way in WAYS}
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            found[way].append(save(way, turn))
    parallel.barrier()
    cpu_began, began = cpu(), time.perf_counter()
    backend.load_checkpoint(Path(folder) / "own")
    found["load"] = {"load_s": time.perf_counter() - began, "load_cpu_s": cpu() - cpu_began}
    found["parameters"] = sum(p.numel() for chunk in backend.chunks for p in chunk.module.parameters())
    from torch.distributed.checkpoint import FileSystemReader

    found["items"] = {way: len(FileSystemReader(Path(folder) / way).read_metadata().storage_data) for way in WAYS}
    parallel.barrier()
    backend.close()
    pipe.send(found)


def counted(work: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`work`, which adds its CPU to `seconds`."""

    def run(*arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        try:
            return work(*arguments, **named)
        finally:
            seconds.append(time.thread_time() - began)

    return run


def world(hidden: int, ranks: int, rounds: int, layers: int = LAYERS) -> list[dict[str, Any]]:
    """A row for each way."""
    with tempfile.TemporaryDirectory() as folder:
        harness.qwen3(
            Path(folder) / "model", vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden,
            num_hidden_layers=layers,
        )  # fmt: skip
        found = harness.world(rank_work, ranks, folder, rounds, patience_s=600)
    rows = []
    for way in WAYS:
        saves = [[rank[way][number] for rank in found] for number in range(1, rounds + 1)]
        figures = {
            "stall_s": statistics.median(max(rank["stall_s"] for rank in save) for save in saves),
            "lead_cpu_s": statistics.median(save[0]["cpu_s"] for save in saves),
            "cpu_s": statistics.median(sum(rank["cpu_s"] for rank in save) for save in saves),
            "merge_s": statistics.median(save[0]["merge_s"] for save in saves),
            "lead_gib": saves[-1][0]["gib"],
        }
        row = {"way": way, "parameters": found[0]["parameters"], "ranks": ranks, "items": found[0]["items"][way]}
        row |= {name: round(value, 4) for name, value in figures.items()}
        if way == "own":
            row |= {name: round(max(rank["load"][name] for rank in found), 3) for name in found[0]["load"]}
        rows.append(row)
        print(row, flush=True)
    return rows


def costs_of(deep: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """CPU for each entry of the index, and for each GiB on the rank that copies or gathers it."""
    item_us = 1e6 * deep["lead_cpu_s"] / deep["items"]
    widest = max(row["parameters"] for row in rows)
    own, *_ = (row for row in rows if row["way"] == "own" and row["parameters"] == widest)
    *_, gathered = (row for row in rows if row["way"] == "gathered" and row["parameters"] == widest)
    return {
        "item_us": round(item_us, 1),
        "merge_us": round(1e6 * deep["merge_s"] / deep["items"], 1),
        "copied_gib_s": round((own["lead_cpu_s"] - own["items"] * item_us / 1e6) / own["lead_gib"], 2),
        "gathered_gib_s": round(gathered["lead_cpu_s"] / (12 * widest / GIB), 2),
    }


def large(name: str, costs: dict[str, float], copy_gb_s: float) -> dict[str, Any]:
    parameters, tensors, shards, ranks = LARGE[name]
    own = math.ceil(tensors / (shards if tensors > MANY else 1))
    # The weight and three states of every tensor of a shard. A cut between two ranks makes at most three more of each
    # state: a row in two parts, and the rows before and after it.
    items = round(shards * (4 * own + 9 * ranks / shards))
    plan_s = ((items / ranks + own) * costs["item_us"] + items * costs["merge_us"]) / 1e6
    copy_s = 14 * parameters / ranks / copy_gb_s / 1e9
    gathered_s = 12 * parameters / shards / GIB * costs["gathered_gib_s"]
    figures = {"plan_s": plan_s, "copy_s": copy_s, "stall_s": plan_s + copy_s, "gathered_s": gathered_s}
    return {"model": name, "items": items} | {name: round(value, 2) for name, value in figures.items()}


@harness.script(ranks=[1, 2, 4], hidden=[128, 512], rounds=3, copy_gb_s=3.0)
def main(options: harness.Options) -> harness.Figures:
    import torch

    import learner.megatron.backend  # noqa: F401  (once for all ranks)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [row for hidden in options.hidden for ranks in options.ranks for row in world(hidden, ranks, options.rounds)]
    deep = world(64, 1, options.rounds, layers=64)[0]
    costs = costs_of(deep, rows)
    models = [large(name, costs, options.copy_gb_s) for name in LARGE]
    return {"rounds": options.rounds, "rows": rows, "deep": deep, "costs": costs, "large": models}
