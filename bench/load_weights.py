"""How long ranks take to get the weights of model.path, from safetensors and from what `slipstream convert` wrote.

    python bench/load_weights.py [--hidden 1536] [--layers 8] [--ranks 1 2] [--rounds 3]

A random Qwen3 in bfloat16, whose files are in the page cache. `ranks` share every matrix, with one thread each. Both
ways load the same built model, in turns; the first load of each does not count. `s` is the time of the slowest rank.
`gb_s` is how many bytes a rank needs, over that time: the whole model from safetensors, its own share when converted.
`build_s` is the time to build the model, with Megatron's random values and as Slipstream does, without.
"""

import statistics
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import harness

WAYS = ("safetensors", "converted")
VOCABULARY = 16384


def rank_work(_rank: int, ranks: int, folder: str, rounds: int, pipe: Connection) -> None:
    """One rank: builds both ways, loads both ways in turns, and sends its figures."""
    import torch

    from common.config.schema import MoeConfig, ParallelConfig
    from learner.megatron import parallel, start_weights
    from learner.megatron.conversion import model as building
    from learner.megatron.conversion.hf_folder import read_config

    torch.set_num_threads(1)
    layout = ParallelConfig(tensor=ranks)
    parallel.initialize(layout, seed=0, timeout_s=300.0)
    source = Path(folder) / "safetensors"

    def built() -> Any:
        return building.build(source, read_config(source), torch.bfloat16, layout, MoeConfig())

    def timed(work: Any, *arguments: Any) -> float:
        parallel.barrier()
        began = time.perf_counter()
        work(*arguments)
        return time.perf_counter() - began

    leave = building._leave
    building._leave = lambda weight: torch.nn.init.normal_(weight, 0.0, 0.02)
    found: dict[str, Any] = {"build": {"random": timed(built)}}
    building._leave = leave
    found["build"]["without"] = timed(built)
    model = built()
    for turn in range(rounds + 1):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            found.setdefault(way, []).append(timed(start_weights.load, Path(folder) / way, model, layout))
    found["bytes"] = sum(p.numel() * p.element_size() for chunk in model.chunks for p in chunk.parameters())
    parallel.barrier()
    parallel.shutdown()
    pipe.send(found)


def rows_of(found: list[dict[str, Any]], model_bytes: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        times = [max(rank[way][turn] for rank in found) for turn in range(1, len(found[0][way]))]
        seconds = statistics.median(times)
        needed = model_bytes if way == "safetensors" else found[0]["bytes"]
        row = {"ranks": len(found), "way": way, "rank_gb": needed / 1e9, "s": seconds, "gb_s": needed / 1e9 / seconds}
        rows.append({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()} | {"rounds_s": times})
        print(rows[-1], flush=True)
    return rows


@harness.script(hidden=1536, layers=8, ranks=[1, 2], rounds=3)
def main(options: harness.Options) -> harness.Figures:
    import torch

    import learner.megatron.backend  # noqa: F401  (once for all ranks)

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        source, target = (Path(folder) / way for way in WAYS)
        harness.qwen3(
            source, vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
        )  # fmt: skip
        torch.set_default_dtype(torch.float32)
        words = ("-m", "learner.checkpoint.convert_main", "--model", source, "--out", target, "--no-verify")
        _, convert_s = harness.timed(lambda: harness.python(*words))
        size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
        worlds = [harness.world(rank_work, ranks, ranks, folder, options.rounds) for ranks in options.ranks]
    builds = {name: max(rank["build"][name] for rank in worlds[0]) for name in worlds[0][0]["build"]}
    return {
        "rounds": options.rounds,
        "model_gb": round(size / 1e9, 3),
        "convert_s": round(convert_s, 1),
        "build_s": {name: round(seconds, 2) for name, seconds in builds.items()},
        "rows": [row for found in worlds for row in rows_of(found, size)],
    }
