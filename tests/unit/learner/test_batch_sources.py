"""A step of several sources: each group with its source's estimator, KL term and use of cut answers."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from broker.contract import StoredGroup
from common.config.schema import Config
from common.rollouts import Group, GroupMeta, encode_group
from learner.batch.batch import BadGroup, SourceFigures, assemble, decode, prepare
from learner.batch.packing import build
from learner.loss.advantages import ADVANTAGES
from learner.loss.types import GroupRewards
from tests.rigs.refusals import refused
from tests.unit.learner.test_batch import sample

SOURCES: dict[str, dict[str, Any]] = {
    "sums": {"advantage": "rloo", "kl_coefficient": 0.125, "success": 2.0},
    "games": {"advantage": "reinforce_pp", "truncated": "masked"},
    "idle": {"weight": 0},
}


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    made = make_config()
    shared = {"environment": "addition", "dataset": made.tasks.dataset}
    document = msgspec.to_builtins(made)
    document["tasks"] = {"sources": {name: shared | own for name, own in SOURCES.items()}}
    return msgspec.convert(document, Config)


def group(serial: int, source: str, rewards: list[float], **changes: Any) -> Group:
    return Group(serial, [sample(reward=reward, **changes) for reward in rewards], source=source)


def test_every_source_has_its_estimator_over_its_own_groups_and_its_kl_term(config: Config) -> None:
    groups = [
        group(0, "sums", [1.0, 4.0]),
        group(1, "games", [0.0, 1.0]),
        group(2, "sums", [2.0, 2.0]),
        group(3, "games", [5.0, 0.5]),
    ]
    batch = assemble(groups[::-1], 0, config)
    expected = dict[int, np.ndarray]()
    for serials, estimator in (((0, 2), "rloo"), ((1, 3), "reinforce_pp")):
        rewards = [GroupRewards.of(np.array([s.reward for s in groups[serial].samples])) for serial in serials]
        expected |= dict(zip(serials, ADVANTAGES[estimator](rewards), strict=True))
    found = {document.origin: document.advantage for document in batch.documents}
    assert found == {(serial, i): float(a) for serial, row in expected.items() for i, a in enumerate(row)}
    assert {document.serial: document.kl_coefficient for document in batch.documents} == {
        0: 0.125,
        1: 0,
        2: 0.125,
        3: 0,
    }
    assert batch.statistics.sources == {
        "sums": SourceFigures(2, 4, 3, 0, rewards=9.0),
        "games": SourceFigures(2, 4, 2, 0, rewards=6.5),
        "idle": SourceFigures(),
    }
    (packed,) = build(batch.documents, [[0, 2, 5]])
    assert packed.kl_coefficients is not None
    lengths = torch.tensor(packed.document_lengths)
    assert torch.equal(packed.kl_coefficients, torch.tensor([0.125, 0.0, 0.125]).repeat_interleave(lengths))


def test_a_reward_that_misses_the_success_by_a_rounding_is_one(make_config: Callable[..., Config]) -> None:
    almost = 0.7 + 0.2 + 0.1
    assert almost < 1
    document = msgspec.to_builtins(make_config())
    source = {"environment": "addition", "dataset": document["tasks"]["dataset"]}
    source |= {"advantage": "pass_at_k", "advantage_options": {"k": 1}}
    document["tasks"] = {"sources": {"sums": source}}
    config = msgspec.convert(document, Config)
    batch = assemble([group(0, "sums", [almost, 0.0])], 0, config)
    assert batch.statistics.sources["sums"].successes == 1
    assert [document.advantage for document in batch.documents] == [1.0, -1.0]


def test_groups_that_were_prepared_before_give_the_same_batch(config: Config) -> None:
    groups = [
        group(0, "sums", [1.0, 4.0], error=None),
        group(1, "games", [0.0, 1.0], stop_reason="length"),
        Group(2, [sample(reward=2.0, error="gone"), sample(reward=1.0)], source="sums"),
        group(3, "games", [5.0, 0.5]),
    ]
    ahead = {found.serial: prepare(found, 3, config.sources, None) for found in groups[1:]}
    found, expected = assemble(groups, 3, config, ahead=ahead), assemble(groups, 3, config)
    assert found.statistics == expected.statistics
    assert len(found.documents) == len(expected.documents)
    for ours, theirs in zip(found.documents, expected.documents, strict=True):
        for name, value in vars(theirs).items():
            np.testing.assert_array_equal(vars(ours)[name], value, name)


def test_a_cut_answer_leaves_the_loss_where_its_source_says_so(config: Config) -> None:
    groups = [group(i, name, [0.0, 1.0], stop_reason="length") for i, name in enumerate(("sums", "games"))]
    batch = assemble(groups, 0, config)
    assert {document.serial for document in batch.documents} == {0}
    assert batch.statistics.tokens_cut == 6
    assert {name: own.truncated for name, own in batch.statistics.sources.items()} == {"sums": 2, "games": 2, "idle": 0}


def test_numbers_of_environments_are_kept_by_source(config: Config) -> None:
    groups = [group(i, name, [0.0, 1.0], metrics={"turns": float(i)}) for i, name in enumerate(("sums", "games"))]
    assert assemble(groups, 0, config).statistics.environment == {"games/turns": 1.0, "sums/turns": 0.0}


def test_a_group_that_was_played_as_another_sources_is_refused() -> None:
    payload = encode_group(group(5, "games", [0.0, 1.0]))
    told = StoredGroup(5, "n", GroupMeta(0, 0, 0.0, 0), payload, source="sums")
    with refused(BadGroup, "sums", "games"):
        decode(told, vocab_size=10, group_size=2)
    assert decode(msgspec.structs.replace(told, source="games"), 10, 2).source == "games"


def test_a_job_of_one_source_has_neither_figures_nor_a_column(make_config: Callable[..., Config]) -> None:
    batch = assemble([Group(0, [sample(reward=1.0), sample()])], 0, make_config())
    assert batch.statistics.sources == {}
    assert build(batch.documents, [[0, 1]])[0].kl_coefficients is None
