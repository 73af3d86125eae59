"""Checkpoints of real Megatron: written behind the next step, loaded under the same and under other layouts.

One run of checkpoint_workers.py does all the work; the tests compare what it left behind.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import fork_rig
from tests.integration.fork_rig import Outcome, group

SAVE_ONE = [{"name": "one"}, {"name": "bf16", "dtype": "bfloat16"}, {"name": "moe", "kind": "moe"}]
SAVE_TWO = [
    {"name": "tp2", "parallel": {"tensor": 2}},
    {"name": "pp2", "parallel": {"pipeline": 2}},
    {"name": "dp2"},
    {"name": "vpp2", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    {"name": "ep2", "kind": "moe", "parallel": {"expert": 2}},
    {"name": "cp2", "parallel": {"context": 2}},
]
SAVE_FOUR = [{"name": "dp4"}, {"name": "ep2-dp2", "kind": "moe", "parallel": {"expert": 2}}]


def again(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [spec | {"name": f"{spec['name']}-again", "checkpoint": spec["name"]} for spec in specs]


def other(checkpoint: str, name: str, kind: str = "tied", **parallel: int) -> dict[str, Any]:
    return {"name": f"{checkpoint}-to-{name}", "checkpoint": checkpoint, "kind": kind, "parallel": parallel}


SAME_ONE, SAME_TWO = again(SAVE_ONE), again(SAVE_TWO)
OTHER_ONE = [
    *(other(name, "one") for name in ("tp2", "pp2", "vpp2", "dp4", "cp2")),
    other("ep2", "one", "moe"),
    other("ep2-dp2", "one", "moe"),
]
OTHER_TWO = [
    other("tp2", "pp2", pipeline=2),
    other("pp2", "dp2"),
    other("dp4", "tp2", tensor=2),
    other("one", "vpp2", pipeline=2, virtual_pipeline=2),
    other("moe", "ep2", "moe", expert=2),
    other("one", "cp2", context=2),
    other("ep2-dp2", "ep2", "moe", expert=2),
]
OTHER_FOUR = [
    other("tp2", "cp2-pp2", context=2, pipeline=2),
    other("ep2", "ep2-pp2", "moe", expert=2, pipeline=2),
    other("ep2", "ep2-tp2", "moe", expert=2, tensor=2),
]
FULL_DISK = {"name": "full", "parallel": {"tensor": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoints")
    (place / "checkpoints").mkdir()
    worlds = [
        group(1, "models", [{"kind": "tied"}, {"kind": "moe"}]),
        group(2, "save", SAVE_TWO),
        group(1, "save", SAVE_ONE),
        group(4, "save", SAVE_FOUR),
        group(1, "fresh", [{"name": "fresh"}]),
        group(2, "resume", SAME_TWO + OTHER_TWO),
        group(1, "resume", SAME_ONE + OTHER_ONE),
        group(4, "resume", OTHER_FOUR),
        group(2, "full_disk", [FULL_DISK]),
        group(1, "mismatch", [{"name": "wrong", "checkpoint": "ep2"}]),
    ]
    fork_rig.run("checkpoint_workers", place, worlds)
    return place


def named(specs: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("spec", specs, ids=[s["name"] for s in specs])


@named(SAVE_ONE + SAVE_TWO + SAVE_FOUR)
def test_a_save_is_there_when_every_rank_says_that_it_is_done(folder: Path, spec: dict[str, Any]) -> None:
    said = [rank["done"] for rank in Outcome(folder / spec["name"]).ranks]
    assert said == [said[0]] * len(said) and said[0][1] is True
    assert (folder / "checkpoints" / spec["name"] / "metadata.json").is_file()


@named(SAME_ONE + SAME_TWO)
def test_resuming_takes_bitwise_the_step_of_the_run_that_went_on(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    assert [rank["after"] for rank in came_back.ranks] == [rank["after"] for rank in went_on.ranks]
    assert [rank["states"] for rank in came_back.ranks] == [rank["states"] for rank in went_on.ranks]
    for section in ("after", "logprobs"):
        expected = went_on.section(section)
        assert expected and came_back.section(section).keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(came_back.section(section)[name], tensor), name


@named(OTHER_ONE + OTHER_TWO + OTHER_FOUR)
def test_another_layout_continues_with_the_same_loss_and_step(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    expected, found = went_on.ranks[0]["after"], came_back.ranks[0]["after"]
    assert found == pytest.approx(expected, rel=2e-5)  # loss, gradient norm, rate
    for name, logprobs in went_on.section("logprobs").items():
        torch.testing.assert_close(came_back.section("logprobs")[name], logprobs, rtol=0, atol=2e-5)
    weights = went_on.section("after")
    assert came_back.section("after").keys() == weights.keys()
    worst = {n: (came_back.section("after")[n] - w).abs().max().item() for n, w in weights.items()}
    assert max(worst.values()) < 1e-6, max(worst.items(), key=lambda item: item[1])


def test_a_checkpoint_from_before_the_first_step_starts_the_optimizer_afresh(folder: Path) -> None:
    first, second = Outcome(folder / "fresh").ranks[0]["steps"]
    assert first == second


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_the_next_one_works(folder: Path) -> None:
    ranks = Outcome(folder / "full").ranks
    assert ranks[0]["messages"] == ranks[1]["messages"]
    before, failed, after, _ = ranks[0]["messages"]
    assert (before, after) == ("", "")
    assert "full-1 could not be written: rank 1: OSError: [Errno 27] File too large" in failed
    assert "older checkpoints are untouched" in failed
    assert {path.name for path in (folder / "checkpoints").glob("*full*")} == {"full-0", "full-2"}


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(folder: Path) -> None:
    for rank in Outcome(folder / "full").ranks:
        assert "in-a-file could not be written: NotADirectoryError" in rank["messages"][3]


def test_a_checkpoint_of_another_model_is_refused_with_both_layouts(folder: Path) -> None:
    message = Outcome(folder / "wrong").ranks[0]["message"]
    assert "checkpoints/ep2: written under expert 2 x data 2, does not load under one rank" in message


def test_nothing_half_written_is_left(folder: Path) -> None:
    assert not list((folder / "checkpoints").glob(".*"))
