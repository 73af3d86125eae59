"""Cases that share the processes of a world, and one that fails."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs import forked_ranks
from tests.rigs.forked_ranks import Outcome, group


def job_case(folder: Path, spec: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    if spec.get("fails") and rank == 1:
        raise RuntimeError("this case fails")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    forked_ranks.write(folder / spec["name"], rank, {"total": total}, {"process": os.getpid()})


def test_neighbours_of_one_size_share_processes_and_a_case_that_fails_is_alone_in_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pairs = [{"name": name, "ranks": 2, "fails": name == "third"} for name in ("first", "second", "third", "fourth")]
    specs = [*pairs, {"name": "fifth", "ranks": 2}, {"name": "alone", "ranks": 1}]
    folder = forked_ranks.run(tmp_path_factory, group(job_case, specs, shared=True))
    found = {name: Outcome(folder / name) for name in ("first", "second", "fourth", "fifth", "alone")}
    used = {name: {rank["process"] for rank in outcome.ranks} for name, outcome in found.items()}
    assert used["first"] == used["second"] and used["fourth"] == used["fifth"]
    assert len(used["first"] | used["fourth"] | used["alone"]) == 5
    assert [outcome.tensors["total"].item() for outcome in found.values()] == [2, 2, 2, 2, 1]
    with pytest.raises(pytest.fail.Exception) as failed:
        Outcome(folder / "third")
    assert "third" in str(failed.value) and "case fails" in str(failed.value)
