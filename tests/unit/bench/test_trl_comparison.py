"""The comparison with TRL: what is compared with what, where a stopped measurement goes on, the patched attention."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_comparison
import trl_patches
from torch.nn.functional import scaled_dot_product_attention
from trl_comparison import (
    OURS,
    WINDOW,
    WORKLOADS,
    Cells,
    Workload,
    cell_name,
    compared,
    figures,
    measure_all,
    row,
    ways_of,
)

from bench.figures import ROOT
from common.config.loading import load_either

OPTIONS = {"workloads": ["short"], "ways": ["transformers", "async"], "seeds": [1, 2], "overrides": [], "budget_s": 1e6}


def timed(step_s: float, rewards: list[float] | None = None) -> dict[str, Any]:
    """Figures of ten steps; the first lasts five seconds longer."""
    found = figures(rewards or [1.0] * 10, [5 + step_s * step for step in range(1, 11)], level=0.9)
    return found | {"set_up_s": 1.0}


def test_the_first_and_last_steps_are_not_in_the_steady_step() -> None:
    times_s = [100.0, 101.0, 102.0, *(102 + 2.0 * step for step in range(1, 7)), 114.1, 114.2]
    found = figures([0.5] * len(times_s), times_s, level=0.0)
    assert WINDOW == 2 and (found["first_step_s"], found["step_s"]) == (100.0, 2.0)
    assert (found["steps_to_level"], found["seconds_to_level"]) == (None, None)


def test_ours_is_compared_with_the_way_of_trl_that_is_fastest_in_that_seed_and_with_the_first_at_the_reward() -> None:
    late = [0.0] * 9 + [1.0]
    found = {
        cell_name("short", OURS, 1): timed(2.0),
        cell_name("short", "transformers", 1): timed(1.0, late),
        cell_name("short", "async", 1): timed(3.0),
    }
    pair = compared("short", 1, ["transformers", "async"], found)
    assert (pair["fastest"], pair["samples_ratio"]) == ("transformers", 0.5)
    assert pair["seconds_ratio"] == pytest.approx(8 / 7, abs=0.01), "transformers never reaches the level"
    assert row("short", "transformers", [1], found)["seconds_to_level"] is None


def test_ways_that_are_known_to_be_slow_on_a_workload_are_left_out_there_alone() -> None:
    options = argparse.Namespace(**OPTIONS)
    assert (ways_of("long_tail", options), ways_of("short", options)) == (["async"], ["transformers", "async"])


def test_a_stopped_measurement_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []

    def measure(self: Cells, workload: str, system: str, seed: int) -> None:
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append((system, seed))
        cell = {"key": self.key, "took_s": 1.0, "figures": timed(1.0)}
        (tmp_path / f"{cell_name(workload, system, seed)}.json").write_text(json.dumps(cell))

    monkeypatch.setattr(trl_comparison, "CELLS", tmp_path)
    monkeypatch.setattr(trl_comparison, "prepare", lambda workload: None)
    monkeypatch.setattr(Cells, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        measure_all(argparse.Namespace(**OPTIONS))
    assert len(set(measured)) == 4
    stopped = measured.copy()
    measured.clear()
    assert len(measure_all(argparse.Namespace(**OPTIONS))) == 6
    assert len(measured) == 2 and not set(measured) & set(stopped)
    measured.clear()
    with pytest.raises(SystemExit):
        measure_all(argparse.Namespace(**OPTIONS | {"overrides": ["learner.threads=2"], "budget_s": 0.5}))
    assert measured == [], "cells of other arguments are not taken, and none fits into the budget"


def test_a_way_far_behind_with_the_first_seed_is_not_measured_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[str, int]] = []

    def measure(self: Cells, workload: str, system: str, seed: int) -> None:
        measured.append((system, seed))
        found = timed({"transformers": 2.0, "async": 1.0}.get(system, 9.0))
        cell = {"key": self.key, "took_s": 1.0, "figures": found}
        (tmp_path / f"{cell_name(workload, system, seed)}.json").write_text(json.dumps(cell))

    monkeypatch.setattr(trl_comparison, "CELLS", tmp_path)
    monkeypatch.setattr(trl_comparison, "prepare", lambda workload: None)
    monkeypatch.setattr(Cells, "measure", measure)
    found = measure_all(argparse.Namespace(**OPTIONS))
    assert set(measured) == {("transformers", 1), ("async", 1), (OURS, 1), ("async", 2), (OURS, 2)}
    assert list(compared("short", 2, ["transformers", "async"], found)["trl"]) == ["async"]
    assert (row("short", "transformers", [1, 2], found)["seeds"], row("short", OURS, [1, 2], found)["seeds"]) == (1, 2)


def test_every_patch_has_a_reason_and_every_way_its_patches() -> None:
    used = {
        name
        for way in trl_patches.WAYS
        for task in ("addition", "number_guessing")
        for name in trl_patches.names(way, task)
    }
    assert used == set(trl_patches.PATCHES)
    assert trl_patches.names("transformers", "addition") == []


def test_every_path_of_a_prefix_tree_gets_the_attention_of_its_own_sequence() -> None:
    """A root of 3 tokens, then a branch of 2 and one of 4; and a second root of 5."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 14, 8) for heads in (4, 2, 2))
    paths = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [9, 10, 11, 12, 13]]
    tree = {
        "tree_kv_index": torch.tensor([token for path in paths for token in path]),
        "tree_cu_seqlens_q": torch.tensor([0, 3, 5, 9, 14]),
        "tree_cu_seqlens_k": torch.tensor([0, 3, 8, 15, 20]),
    }
    found = trl_patches.tree_attention(None, query, key, value, None, **tree)[0][0]
    for path in paths[1:]:
        q, k, v = (x[:, :, path] for x in (query, key, value))
        alone = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found[path], alone)


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(self: Cells, workload: str, system: str, seed: int) -> None:
        measured.append(system)
        raise RuntimeError("its engine died")

    monkeypatch.setattr(trl_comparison, "CELLS", tmp_path)
    monkeypatch.setattr(trl_comparison, "prepare", lambda workload: None)
    monkeypatch.setattr(Cells, "measure", measure)
    with pytest.raises(SystemExit):
        measure_all(argparse.Namespace(**OPTIONS))
    assert len(measured) == 6


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_workloads_model_is_where_its_warm_start_puts_it(workload: Workload) -> None:
    config = load_either(ROOT / workload.warm_start)
    assert str(config.run.dir).endswith(str(Path(workload.model).parent))
