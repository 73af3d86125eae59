"""Checkpoints of real Megatron: written behind the next step, loaded under the same and under other layouts."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import SlipstreamError, UsageError
from tests.integration.megatron import fork_rig, tiny_models
from tests.integration.megatron.fork_rig import Outcome, group
from tests.integration.megatron.tiny_models import exported, figures

SAVED_AT = 3  # steps before the checkpoint
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


def job_save(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps, a checkpoint, and the next step while it is being written."""
    backend = tiny_models.backend(folder, spec)
    before = [figures(backend, n) for n in range(SAVED_AT)]
    tensors = tiny_models.logprobs(backend)
    backend.start_checkpoint(folder / "checkpoints" / spec["name"])
    result: dict[str, Any] = {"before": before, "after": figures(backend, SAVED_AT)}
    result["done"] = [backend.checkpoint_done(wait=False), backend.checkpoint_done(wait=True)]
    result["states"] = state_digest(backend)
    tensors |= exported(backend, "after")
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Load a checkpoint in this new process, under the given layout, and take one more step."""
    backend = tiny_models.backend(folder, spec | {"seed": 99})
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    tensors = tiny_models.logprobs(backend)
    result = {"after": figures(backend, SAVED_AT), "states": state_digest(backend)}
    tensors |= exported(backend, "after")
    fork_rig.write(folder / spec["name"], backend.rank, tensors, result)


def job_fresh(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint from before the first step, loaded into an optimizer that has taken some."""
    backend = tiny_models.backend(folder, spec)
    tiny_models.save_checkpoint(backend, folder / "checkpoints" / spec["name"])
    steps = [[figures(backend, n) for n in range(2)]]
    backend.load_checkpoint(folder / "checkpoints" / spec["name"])
    steps.append([figures(backend, n) for n in range(2)])
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"steps": steps})


def job_full_disk(folder: Path, spec: dict[str, Any]) -> None:
    """A save that the file system refuses on the last rank, one that works, and a folder that cannot be made."""
    backend = tiny_models.backend(folder, spec)
    figures(backend, 0)
    messages = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt, small in enumerate((False, True, False)):
        if small and backend.rank == backend.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # writing more is an OSError
        try:
            tiny_models.save_checkpoint(backend, folder / "checkpoints" / f"{spec['name']}-{attempt}")
            messages.append("")
        except SlipstreamError as error:
            messages.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    try:
        backend.start_checkpoint(folder / "models" / "tied" / "config.json" / "in-a-file")
    except SlipstreamError as error:
        messages.append(str(error))
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"messages": messages})


def job_mismatch(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint of another model."""
    backend = tiny_models.backend(folder, spec)
    message = ""
    try:
        backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    except UsageError as error:
        message = str(error)
    fork_rig.write(folder / spec["name"], backend.rank, {}, {"message": message})


def state_digest(backend: Any) -> list[float]:
    """Numbers that change when any main parameter or state of the optimizer on this rank does."""
    digest = []
    for parameter, state in tiny_models.main_parameters(backend):
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
        digest += [float(t.detach().double().abs().sum()) for t in tensors] + [float(state["step"])]
    return digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fork_rig.run(
        tmp_path_factory,
        group(1, tiny_models.job_models, [{"kinds": ["tied", "moe"]}]),
        group(2, job_save, SAVE_TWO),
        group(1, job_save, SAVE_ONE),
        group(4, job_save, SAVE_FOUR),
        group(1, job_fresh, [{"name": "fresh"}]),
        group(2, job_resume, SAME_TWO + OTHER_TWO),
        group(1, job_resume, SAME_ONE + OTHER_ONE),
        group(4, job_resume, OTHER_FOUR),
        group(2, job_full_disk, [FULL_DISK]),
        group(1, job_mismatch, [{"name": "wrong", "checkpoint": "ep2"}]),
    )


@fork_rig.named(SAVE_ONE + SAVE_TWO + SAVE_FOUR)
def test_a_save_is_there_when_every_rank_says_that_it_is_done(folder: Path, spec: dict[str, Any]) -> None:
    said = [rank["done"] for rank in Outcome(folder / spec["name"]).ranks]
    assert said == [said[0]] * len(said) and said[0][1] is True
    assert (folder / "checkpoints" / spec["name"] / "metadata.json").is_file()


@fork_rig.named(SAME_ONE + SAME_TWO)
def test_resuming_takes_bitwise_the_step_of_the_run_that_went_on(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    assert [rank["after"] for rank in came_back.ranks] == [rank["after"] for rank in went_on.ranks]
    assert [rank["states"] for rank in came_back.ranks] == [rank["states"] for rank in went_on.ranks]
    for section in ("after", "logprobs"):
        expected = went_on.section(section)
        assert expected and came_back.section(section).keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(came_back.section(section)[name], tensor), name


@fork_rig.named(OTHER_ONE + OTHER_TWO + OTHER_FOUR)
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
