"""The log-probabilities for transcripts, kept while a step trains, under real layouts against a pass of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config.loss_keys import LossConfig
from learner.backend_protocol import Microbatch
from learner.batch.balance import Plan
from learner.batch.packing import Document, build, plan
from learner.batch.updates import Part, numbers
from learner.loop.share import Told, cells, decode, encode
from learner.loop.transcripts import RecordingLoss
from learner.loss.losses import policy_loss
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import Outcome, group
from tests.rigs.tiny_models import TEMPERATURE, VOCABULARY

LENGTHS = (41, 4, 18, 2, 34, 17, 6, 30, 9, 9, 32, 13, 3)
CHOSEN = [(0, 0), (0, 4), (1, 2), (2, 1), (2, 2)]  # (serial, sample)
SPECS: list[dict[str, Any]] = [
    {"name": "one"},
    {"name": "dp2", "ranks": 2},
    {"name": "tp2-pp2-cp2", "parallel": {"tensor": 2, "pipeline": 2, "context": 2}},
    {"name": "vpp2", "kind": "tied-deep", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
]


def documents() -> list[Document]:
    draw = np.random.default_rng(3)
    return [
        Document(
            tokens=draw.integers(3, VOCABULARY, length).astype(np.int32),
            loss_mask=(np.arange(length) > length // 3).astype(np.uint8),
            behavior_logprobs=np.full(length, -4.0, dtype=np.float32),
            advantage=float(draw.normal()),
            serial=number // 5,
            sample=number % 5,
        )
        for number, length in enumerate(LENGTHS)
    ]


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """The log-probabilities that a step keeps, and those of the same documents before it."""
    backend = tiny_models.backend(folder, spec)
    plans = plan(documents(), backend.data_parallel_size, 64, backend.document_multiple)
    mine = plans[backend.data_parallel_rank]
    packed = delivered(backend, plans)
    same = contents(packed) == contents(build(documents(), mine))
    before = backend.logprobs(packed, TEMPERATURE)
    loss = RecordingLoss(policy_loss(LossConfig(), 64))
    loss.watch(documents(), CHOSEN)
    backend.train_step(packed, loss, TEMPERATURE, True)
    kept = loss.collect(backend)
    found = {f"kept.{serial}.{sample}": torch.from_numpy(x) for (serial, sample, _), x in kept.items()}
    for own, batch, row in zip(mine, packed, before, strict=True):
        for number, part in zip(own, row.split(batch.document_lengths), strict=False):
            found[f"before.{number // 5}.{number % 5}"] = part
    forked_ranks.write(folder / spec["name"], backend.rank, found, {"left": len(loss.collect(backend)), "same": same})


def contents(microbatches: list[Microbatch]) -> list[Any]:
    return [(b.numbers, b.tokens.tolist(), b.loss_mask.tolist(), b.advantages.tolist()) for b in microbatches]


def delivered(backend: Any, plans: Plan) -> list[Microbatch]:
    """This rank's microbatches, from the bytes that rank 0 sends."""
    here = build(documents(), plans[backend.data_parallel_rank])
    if backend.world_size == 1:
        return here
    found = cells(backend)

    def part(number: int) -> np.ndarray:
        own = [Part(0, 0, plans[found[number].replica])]
        return encode(Told(), {n: documents()[n] for n in numbers(own)}, own)

    data = backend.deliver(part if backend.rank == 0 else None, [cell.ranks for cell in found])
    if not len(data):
        assert backend.rank == 0  # it is alone in its cell
        return here
    _, own, (part,) = decode(data)
    return build(own, part.microbatches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = group(tiny_models.job_models, [{"kinds": ["tied", "tied-deep"]}])
    return forked_ranks.run(tmp_path_factory, models, group(job_layout, SPECS, shared=True))


@pytest.mark.parametrize("layout", [spec["name"] for spec in SPECS])
def test_a_step_keeps_the_log_probabilities_that_chosen_documents_had_before_it_on_every_rank(
    folder: Path, layout: str
) -> None:
    found = Outcome(folder / layout)
    before = found.section("before")
    assert len(before) == len(LENGTHS)
    names = {f"{serial}.{sample}" for serial, sample in CHOSEN}
    for rank, tensors in enumerate(found.tensors_of):
        kept = forked_ranks.section(tensors, "kept")
        assert kept.keys() == names, rank
        for name in names:
            torch.testing.assert_close(kept[name], before[name], rtol=0, atol=1e-6)
    assert len({len(x) for x in (before[name] for name in names)}) > 1
    assert [rank["left"] for rank in found.ranks] == [0] * len(found.ranks), "a step's are given out once"
    assert all(rank["same"] for rank in found.ranks), "every rank got the documents of its replica from the lead rank"


def test_every_layout_of_a_model_finds_the_same(folder: Path) -> None:
    alone, *others = (spec for spec in SPECS if "kind" not in spec)
    one = Outcome(folder / alone["name"]).section("kept")
    for spec in others:
        forked_ranks.same(Outcome(folder / spec["name"]).section("kept"), one, atol=1e-4)
