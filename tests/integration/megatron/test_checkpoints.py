"""Checkpoints of real Megatron: written behind the next step, loaded under the same and under other layouts."""

import itertools
import math
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group, same
from tests.rigs.gathered_states import gathered
from tests.rigs.tiny_models import exported, figures

SAVED_AT = 2  # steps before the checkpoint
SAVE: list[dict[str, Any]] = [
    {"name": "one", "kind": "tied-deep"}, {"name": "bf16", "dtype": "bfloat16"}, {"name": "moe", "kind": "moe"},
    {"name": "tp2", "parallel": {"tensor": 2}}, {"name": "pp2", "parallel": {"pipeline": 2}},
    {"name": "vpp2", "kind": "tied-deep", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    {"name": "cp2", "parallel": {"context": 2}}, {"name": "dp2", "ranks": 2},
    {"name": "ep2", "kind": "moe", "parallel": {"expert": 2}},
    {"name": "ep2-dp2", "kind": "moe", "parallel": {"expert": 2}, "ranks": 4},
    {"name": "earlier-dp2", "ranks": 2, "gathered": True},
    {"name": "earlier-ep2", "kind": "moe", "parallel": {"expert": 2}, "gathered": True},
]  # fmt: skip
SAME = [spec | {"name": f"{spec['name']}-again", "checkpoint": spec["name"]} for spec in SAVE if spec.get("ranks") != 4]


def other(checkpoint: str, name: str, kind: str = "tied", ranks: int = 0, **parallel: int) -> dict[str, Any]:
    spec = {"name": f"{checkpoint}-to-{name}", "checkpoint": checkpoint}
    return spec | {"kind": kind, "ranks": ranks, "parallel": parallel}


OTHER = [
    *(other(name, "one") for name in ("tp2", "pp2", "dp2", "cp2")), other("vpp2", "one", "tied-deep"),
    other("ep2", "one", "moe"), other("ep2-dp2", "one", "moe"), other("tp2", "pp2", pipeline=2),
    other("pp2", "dp2", ranks=2), other("dp2", "tp2", tensor=2), other("tp2", "cp2", context=2),
    other("one", "vpp2", "tied-deep", pipeline=2, virtual_pipeline=2),
    other("moe", "ep2", "moe", expert=2), other("ep2-dp2", "ep2", "moe", expert=2),
    other("ep2", "ep2-tp2-pp2", "moe", expert=2, tensor=2, pipeline=2),
]  # fmt: skip
FULL_DISK = {"name": "full", "parallel": {"tensor": 2}}


def job_save(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps, a checkpoint, and the next step while it is being written."""
    backend = tiny_models.backend(folder, spec)
    before = [figures(backend, n) for n in range(SAVED_AT)]
    tensors = tiny_models.logprobs(backend)
    with gathered(backend) if spec.get("gathered") else nullcontext():  # as earlier releases did
        backend.start_checkpoint(folder / "checkpoints" / spec["name"])
    result: dict[str, Any] = {"before": before, "after": figures(backend, SAVED_AT)}
    result["done"] = [backend.checkpoint_done(wait=False), backend.checkpoint_done(wait=True)]
    result["states"] = state_digest(backend)
    tensors |= exported(backend, "after")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_boxes(folder: Path, spec: dict[str, Any]) -> None:
    """Every range of some shapes, put together again from its boxes."""
    from learner.megatron.own_states import boxes

    wrong = []
    for shape in ((), (7,), (3, 5), (1, 4, 3), (3, 2, 4)):
        whole = torch.arange(math.prod(shape)).view(shape)
        for start, end in itertools.combinations(range(whole.numel() + 1), 2):
            found = [
                whole[tuple(map(slice, at, map(sum, zip(at, of, strict=True))))] for at, of in boxes(shape, start, end)
            ]
            joined = torch.cat([box.reshape(-1) for box in found]).tolist()
            if joined != [*range(start, end)] or len(found) > max(1, 2 * len(shape) - 1):
                wrong.append([shape, start, end])
        assert not list(boxes(shape, 0, 0))
    forked_ranks.write(folder / spec["name"], 0, {}, {"wrong": wrong})


def job_shares(folder: Path, spec: dict[str, Any]) -> None:
    """How many bytes each rank writes of a checkpoint; another save after a step, and what it has."""
    backend = tiny_models.backend(folder, spec)
    figures(backend, 0)
    path = folder / "checkpoints" / spec["name"]
    tiny_models.save_checkpoint(backend, path)
    size = sum(file.stat().st_size for file in path.glob(f"__{backend.rank}_*"))
    kept = backend.checkpoints._host._kept
    places = {index: copy.data_ptr() for index, copy in kept.items()}
    figures(backend, 1)
    again = folder / "checkpoints" / f"{spec['name']}-again"
    tiny_models.save_checkpoint(backend, again)
    same = bool(places) and places == {index: copy.data_ptr() for index, copy in kept.items()}
    states = state_digest(backend)
    figures(backend, 2)
    backend.load_checkpoint(again)
    groups = [group for part in backend.optimizer.megatron.chained_optimizers for group in part.optimizer.param_groups]
    found = {"bytes": size, "same_memory": same, "same_states": state_digest(backend) == states}
    found["foreach"] = [group.get("foreach", False) for group in groups]
    forked_ranks.write(folder / spec["name"], backend.rank, {}, found)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    """Load a checkpoint under the given layout, and take one more step."""
    backend = tiny_models.backend(folder, spec | {"seed": 99})
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    tensors = tiny_models.logprobs(backend)
    result = {"after": figures(backend, SAVED_AT), "states": state_digest(backend)}
    tensors |= exported(backend, "after")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_fresh(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint from before the first step, loaded into an optimizer that has taken some."""
    backend = tiny_models.backend(folder, spec)
    tiny_models.save_checkpoint(backend, folder / "checkpoints" / spec["name"])
    steps = [[figures(backend, n) for n in range(2)]]
    backend.load_checkpoint(folder / "checkpoints" / spec["name"])
    steps.append([figures(backend, n) for n in range(2)])
    forked_ranks.write(folder / spec["name"], backend.rank, {}, {"steps": steps})


def job_full_disk(folder: Path, spec: dict[str, Any]) -> None:
    """A save that the file system refuses on the last rank, one that works, and a folder that cannot be made."""
    backend = tiny_models.backend(folder, spec)
    figures(backend, 0)
    messages = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for attempt, small in enumerate((False, True, False)):
        if small and backend.rank == backend.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # writing more is an OSError
        path = folder / "checkpoints" / f"{spec['name']}-{attempt}"
        messages.append(tiny_models.refusal(tiny_models.save_checkpoint, backend, path))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    in_a_file = folder / "models" / "tied" / "config.json" / "in-a-file"
    messages.append(tiny_models.refusal(backend.start_checkpoint, in_a_file))
    forked_ranks.write(folder / spec["name"], backend.rank, {}, {"messages": messages})


def job_mismatch(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint of another model."""
    backend = tiny_models.backend(folder, spec)
    said = tiny_models.refusal(backend.load_checkpoint, folder / "checkpoints" / spec["checkpoint"])
    forked_ranks.write(folder / spec["name"], backend.rank, {}, {"message": said})


def state_digest(backend: Any) -> list[float]:
    """Numbers that change when any main parameter or state of the optimizer on this rank does."""
    digest = []
    for parameter, state in tiny_models.main_parameters(backend):
        tensors = (parameter, state["exp_avg"], state["exp_avg_sq"])
        digest += [float(t.detach().double().abs().sum()) for t in tensors] + [float(state["step"])]
    return digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(tiny_models.job_models, [{"kinds": ["tied", "tied-deep", "moe"]}]),
        group(job_save, SAVE, shared=True),
        group(job_boxes, [{"name": "boxes"}]),
        group(job_shares, [{"name": "shares", "kind": "moe", "parallel": {"expert": 2}, "ranks": 4}]),
        group(job_fresh, [{"name": "fresh"}]),
        group(job_resume, SAME),  # in new processes, which have nothing but the checkpoint
        group(job_resume, OTHER, shared=True),
        group(job_full_disk, [FULL_DISK]),
        group(job_mismatch, [{"name": "wrong", "checkpoint": "ep2"}]),
    )


@forked_ranks.named(SAVE)
def test_a_save_is_there_when_every_rank_says_that_it_is_done(folder: Path, spec: dict[str, Any]) -> None:
    said = [rank["done"] for rank in Outcome(folder / spec["name"]).ranks]
    assert said == [said[0]] * len(said) and said[0][1] is True
    assert (folder / "checkpoints" / spec["name"] / "metadata.json").is_file()


@forked_ranks.named(SAME)
def test_resuming_takes_bitwise_the_step_of_the_run_that_went_on(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    assert [rank["after"] for rank in came_back.ranks] == [rank["after"] for rank in went_on.ranks]
    assert [rank["states"] for rank in came_back.ranks] == [rank["states"] for rank in went_on.ranks]
    same(came_back.tensors, went_on.tensors)


@forked_ranks.named(OTHER)
def test_another_layout_continues_with_the_same_loss_and_step(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    expected, found = went_on.ranks[0]["after"], came_back.ranks[0]["after"]
    assert found == pytest.approx(expected, rel=2e-5)  # loss, gradient norm, rate
    same(came_back.section("logprobs"), went_on.section("logprobs"), atol=2e-5)
    same(came_back.section("after"), went_on.section("after"), atol=1e-6)


def test_the_boxes_of_a_range_are_its_elements_in_order(folder: Path) -> None:
    assert Outcome(folder / "boxes").ranks[0]["wrong"] == []


def test_no_rank_writes_much_more_than_its_share(folder: Path) -> None:
    sizes = [rank["bytes"] for rank in Outcome(folder / "shares").ranks]
    assert max(sizes) < 1.5 * sum(sizes) / len(sizes)


def test_a_second_save_takes_the_memory_of_the_first_and_holds_what_came_between(folder: Path) -> None:
    for rank in Outcome(folder / "shares").ranks:
        assert rank["same_memory"] and rank["same_states"]
        assert not any(rank["foreach"]), "torch's AdamW would keep all intermediate results, also after a load"


def test_a_checkpoint_from_before_the_first_step_starts_the_optimizer_afresh(folder: Path) -> None:
    first, second = Outcome(folder / "fresh").ranks[0]["steps"]
    assert first == second


def test_a_write_that_fails_on_one_rank_is_an_error_on_all_and_the_next_one_works(folder: Path) -> None:
    ranks = Outcome(folder / "full").ranks
    assert ranks[0]["messages"] == ranks[1]["messages"]
    before, failed, after, not_begun = ranks[0]["messages"]
    assert "in-a-file " in not_begun and "NotADirectoryError" in not_begun
    assert (before, after) == ("", "")
    for fact in ("full-1 ", "rank 1:", "OSError: [Errno 27]"):
        assert fact in failed
    assert {path.name for path in (folder / "checkpoints").glob("*full*")} == {"full-0", "full-2"}


def test_a_checkpoint_of_another_model_is_refused_with_both_layouts(folder: Path) -> None:
    message = Outcome(folder / "wrong").ranks[0]["message"]
    for fact in ("checkpoints/ep2: ", "expert 2", "data 2", "one rank"):
        assert fact in message
    assert not list((folder / "checkpoints").glob(".*")), "nothing half-written is left by any save"
