"""Objectives over the whole batch: which tokens they mark, by hand, and the same on any number of ranks."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.config.loss_keys import LossConfig
from common.config.schema import Config
from common.process.health import LifeSigns
from learner.backend_protocol import Microbatch
from learner.loop.rollout_source import RolloutSource
from learner.loop.share import Cell
from learner.loss import whole_batch
from learner.loss.whole_batch import BatchTokens, choose, clip_cov, decode, encode, kl_cov, m2po, tokens_of, with_marks
from tests.unit.learner.loop_fakes import MakeWorld
from tests.unit.learner.loss_reference import Case
from tests.unit.learner.test_losses import CASE

COV = LossConfig(objective="clip_cov", objective_options={"share": 0.2, "least": 0.05, "most": 5.0})
MOMENT = LossConfig(objective="m2po", proximal="behavior", objective_options={"moment": 0.3})
KL = LossConfig(objective="kl_cov", proximal="loglinear", objective_options={"share": 0.3, "coefficient": 2.0})
LOSSES = {"clip_cov": COV, "m2po": MOMENT, "kl_cov": KL}
SEED = (7, 3)


def tokens(logprobs: list[float], advantages: list[float], draws: list[float] | None = None) -> BatchTokens:
    made = [np.array(column) for column in (logprobs, [0.0] * len(logprobs), advantages)]
    return BatchTokens(*made, np.array(draws or [0.5] * len(logprobs)))


def test_m2po_marks_the_fewest_tokens_that_bring_the_second_moment_down() -> None:
    moved = tokens([0.1, -1.0, 0.3, 2.0, 0.0], [1.0] * 5)  # squares 0.01, 1, 0.09, 4, 0; their means 1.02, 0.275, 0.033
    assert m2po(moved, moment=1.1).tolist() == [False] * 5
    assert m2po(moved, moment=0.3).tolist() == [False, False, False, True, False]
    assert m2po(moved).tolist() == [False, True, False, True, False]
    assert m2po(tokens([3.0, 2.0], [1.0] * 2)).tolist() == [True, False], "one token stays"


def test_covariance_is_that_of_log_probabilities_and_advantages_over_the_batch() -> None:
    made = tokens([-3.0, -1.0, -2.0, -2.0], [-2.0, 2.0, 1.0, -1.0])
    np.testing.assert_allclose(made.covariances, [2, 2, 0, 0])
    assert kl_cov(made, share=0.5).tolist() == [True, True, False, False]
    assert kl_cov(made, share=0.001).sum() == 1, "at least one"


def test_clip_cov_draws_among_the_tokens_of_the_range() -> None:
    made = tokens(
        [-3.0, -1.0, -2.0, -2.0, -3.0, -1.0], [-2.0, 2.0, 1.0, -1.0, -1.0, 1.0], [0.9, 0.1, 0.2, 0.3, 0.4, 0.0]
    )
    np.testing.assert_allclose(made.covariances, [2, 2, 0, 0, 1, 1])
    assert clip_cov(made, share=0.34, least=0.5, most=1.5).tolist() == [False] * 4 + [True] * 2
    assert clip_cov(made, share=0.34, least=0.5, most=9.0).tolist() == [False, True, False, False, False, True]
    assert clip_cov(made, share=0.001, least=1.5, most=9.0).tolist() == [False, True] + [False] * 4, "at least one"
    assert not clip_cov(made, share=1.0, least=5.0, most=9.0).any()


def joined(cases: list[Case]) -> Case:
    names = [field.name for field in dataclasses.fields(Case) if field.name != "begin"]
    columns = {name: [x for case in cases for x in getattr(case, name)] for name in names}
    return Case(**{**columns, "lengths": tuple(columns["lengths"])})


def numbered(case: Case, numbers: tuple[int, ...]) -> Microbatch:
    return dataclasses.replace(case.microbatch(), numbers=numbers, marked=None)


def marked(config: LossConfig, replicas: list[list[tuple[int, ...]]]) -> dict[int, list[bool]]:
    """Marks of each document's places; `replicas`: the documents of each microbatch of each replica."""
    parts, batches = CASE.parts(), []
    told: list[bytes] = []
    for replica in replicas:
        own = []
        for numbers in replica:
            own.append(numbered(joined([parts[n] for n in numbers]), numbers))
        logprobs = [torch.tensor([x for n in numbers for x in parts[n].logprobs]) for numbers in replica]
        told.append(encode(tokens_of(config, own, logprobs)))
        batches += own
    found = choose(config, [decode(data) for data in (*told, b"")], SEED)
    out: dict[int, list[bool]] = {}
    for batch in batches:
        marks = with_marks(batch, found).marked
        assert marks is not None and not (marks & (batch.loss_mask == 0)).any()
        for number, own in zip(batch.numbers, marks.split(batch.document_lengths), strict=True):
            out[number] = own.tolist()
    return out


@pytest.mark.parametrize("name", LOSSES)
def test_marks_do_not_depend_on_packing_or_on_the_number_of_replicas(name: str) -> None:
    config = LOSSES[name]
    expected = marked(config, [[(0, 1, 2, 3, 4, 5)]])
    assert 0 < sum(sum(own) for own in expected.values()) < sum(CASE.mask)
    for layout in ([[(5,), (4, 2), (0,), (3, 1)]], [[(3, 0)], [(5, 1), (2,), (4,)]], [[(2,)], [(1,)], [(0, 3, 4, 5)]]):
        assert marked(config, layout) == expected


def test_a_batch_without_loss_tokens_has_no_marks() -> None:
    empty = dataclasses.replace(CASE, mask=[0] * len(CASE.mask))
    batch = numbered(empty, tuple(range(len(CASE.lengths))))
    found = choose(COV, [tokens_of(COV, [batch], [torch.tensor(CASE.logprobs)])], SEED)
    marks = with_marks(batch, found).marked
    assert marks is not None and not marks.any()


class Rank:
    """A backend's log-probabilities on one of three ranks: two of the first replica, one of the second."""

    cells = [Cell(0, (), (0, 1)), Cell(1, (), (2,))]

    def __init__(self, rank: int, sent: dict[int, bytes], all_sent: list[bytes]) -> None:
        self.rank, self.data_parallel_rank = rank, int(rank == 2)
        self._sent, self._all_sent = sent, all_sent

    def logprobs(self, microbatches: list[Microbatch], temperature: float) -> list[torch.Tensor]:
        return [torch.tensor(CASE.parts()[n].logprobs) for batch in microbatches for n in batch.numbers]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._sent[self.rank] = data
        return self._all_sent


def test_the_first_rank_of_a_replica_sends_its_tokens_and_every_rank_marks_alike(
    make_config: Callable[..., Config],
) -> None:
    loss = {"objective": "m2po", "proximal": "behavior", "correction": "none", "objective_options": {"moment": 0.3}}
    config = make_config(learner={"loss": loss})
    parts = CASE.parts()
    own = {rank: [numbered(parts[n], (n,)) for n in ((0, 1, 2) if rank < 2 else (3, 4, 5))] for rank in range(3)}
    sent: dict[int, bytes] = {}
    all_sent: list[bytes] = []
    found: dict[int, list[bool]] = {}
    for turn in range(2):  # in the second turn every rank has what the others sent
        for rank in range(3):
            source = RolloutSource(config)
            source.backend = Rank(rank, sent, all_sent)  # type: ignore[assignment]
            source._cells = Rank.cells
            if turn:
                for batch in source.complete(own[rank], lambda: None):
                    assert batch.marked is not None
                    assert found.setdefault(batch.numbers[0], batch.marked.tolist()) == batch.marked.tolist()
            else:
                tokens_here = tokens_of(config.learner.loss, own[rank], source.backend.logprobs(own[rank], 1.0))
                sent[rank] = b"" if rank == 1 else encode(tokens_here)
        all_sent[:] = [sent[rank] for rank in range(3)]
        if turn:
            assert sent[1] == b"" and sent[0] and sent[2]
    assert found == marked(MOMENT, [[(0, 1, 2, 3, 4, 5)]])


class Slow(Rank):
    """Every pass takes most of the time after which a probe would end the process; a critic makes one, too."""

    def __init__(self, signs: LifeSigns, clock: list[float]) -> None:
        super().__init__(0, {}, [])
        self.signs, self.clock, self.critic, self.seen = signs, clock, self, list[int]()

    def logprobs(self, microbatches: list[Microbatch], temperature: float) -> list[torch.Tensor]:
        self.clock[0] += 400.0
        self.seen.append(self.signs.answer("/healthz")[0])
        return super().logprobs(microbatches, temperature)

    reference_logprobs = logprobs

    def values(self, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        return self.logprobs(microbatches, 1.0)


def test_each_pass_before_an_update_may_take_as_long_as_an_update(make_config: Callable[..., Config]) -> None:
    config = make_config(learner={"critic": {"kl_coefficient": 0.1}, "loss": {"advantage": "gae"}})
    clock = [0.0]
    signs = LifeSigns(600.0, clock=lambda: clock[0])
    signs.show("training", True)
    source, slow = RolloutSource(config), Slow(signs, clock)
    source.backend = slow  # type: ignore[assignment]
    source._cells = []
    source.complete([numbered(CASE.parts()[0], (0,))], lambda: signs.show("training", True))
    assert slow.seen == [200, 200, 200], "reference, policy and critic"


@pytest.mark.parametrize("name", LOSSES)
def test_a_job_trains_with_it(make_world: MakeWorld, name: str) -> None:
    loss = {"objective": name, "proximal": "behavior", "correction": "none"}
    world = make_world(learner={"groups_per_step": 2, "checkpoint": {"every": 2}, "loss": loss})
    assert whole_batch.marks(world.trainer.config.learner.loss)
    assert world.run() == "done"
    assert world.trainer.version == 4
