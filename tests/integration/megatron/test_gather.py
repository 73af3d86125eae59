"""Gathering bytes where most ranks have none: the result, and the memory that it takes."""

from pathlib import Path
from typing import Any

import pytest

from common.config.schema import ParallelConfig
from tests.rigs import forked_ranks
from tests.rigs.forked_ranks import Outcome, group
from tests.rigs.waiting import LIMIT_S

RANKS, LARGE = 4, 24 << 20
CASES: dict[str, tuple[int, ...]] = {"small": (3, 0, 1, 2), "large": (0, LARGE, 0, 5)}  # bytes of each rank


def job_gather(folder: Path, spec: dict[str, Any]) -> None:
    from torch import distributed as dist

    from learner.megatron import parallel

    parallel.initialize(ParallelConfig(), 1, LIMIT_S)
    rank = dist.get_rank()
    own = bytes([rank + 1]) * CASES[spec["name"]][rank]
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = peak_bytes()
    found = parallel.gather(own)
    result = {"peak": peak_bytes() - before, "sizes": [len(data) for data in found]}
    result["values"] = [sorted(set(data)) for data in found]
    forked_ranks.write(folder / spec["name"], rank, {}, result)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_every_rank_gets_the_bytes_of_all_and_no_places_for_those_without_any(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    specs = [{"name": name, "ranks": RANKS} for name in CASES]
    folder = forked_ranks.run(tmp_path_factory, group(job_gather, specs, shared=True))
    for name, sizes in CASES.items():
        for rank in Outcome(folder / name).ranks:
            assert rank["sizes"] == list(sizes)
            assert rank["values"] == [[number + 1] if size else [] for number, size in enumerate(sizes)]
            assert rank["peak"] < 3 * LARGE
