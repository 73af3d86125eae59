"""From rewards and values to the columns of a batch: whose reward a token gets, and means over all replicas."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config.critic import CriticConfig
from common.rollouts import Branch, Sample, VersionRun
from common.wire_types import Array
from learner.backend_protocol import NOTHING_TRAINED, Microbatch
from learner.batch.group_rewards import rewards_of_tokens
from learner.batch.packing import Document, build
from learner.loop.step_metrics import critic_figures
from learner.loss.estimates import estimated, moments_of, normalized


def sample(mask: list[int], spans: list[tuple[int, int]], rewards: list[float], branches: int = 0) -> Sample:
    columns = {
        "tokens": Array.of(np.arange(len(mask)), "int32"),
        "loss_mask": Array.of(np.array(mask), "uint8"),
        "behavior_logprobs": Array.of(np.zeros(len(mask)), "float32"),
        "version_runs": [VersionRun(0, 0)],
    }
    more = [Branch(**columns) for _ in range(branches)]
    told = {"reward": sum(rewards), "turn_rewards": rewards, "turn_spans": spans, "stop_reason": "stop"}
    return Sample(**columns, **told, branches=more)


def test_a_turn_is_paid_at_its_last_token() -> None:
    turns = sample([0, 1, 1, 0, 0, 1, 1], [(1, 3), (5, 7)], [0.5, 2.0])
    assert rewards_of_tokens(turns, 0).tolist() == [0, 0, 0.5, 0, 0, 0, 2.0]


def test_a_turn_without_tokens_pays_the_token_before_it() -> None:
    turns = sample([0, 1, 1, 0], [(1, 3), (3, 3)], [0.5, 2.0])
    assert rewards_of_tokens(turns, 0).tolist() == [0, 0, 2.5, 0]


@pytest.mark.parametrize(("spans", "branches"), [([], 0), ([(1, 3)], 0), ([(1, 3), (5, 7)], 1)])
def test_a_sample_without_spans_or_with_branches_is_paid_as_a_whole(
    spans: list[tuple[int, int]], branches: int
) -> None:
    turns = sample([0, 1, 1, 0, 0, 1, 0], spans, [0.5, 2.0], branches)
    for path in range(branches + 1):
        assert rewards_of_tokens(turns, path).tolist() == [0, 0, 0, 0, 0, 2.5, 0]


def pack(*masks: list[int]) -> Microbatch:
    documents = [
        Document(
            tokens=np.arange(len(mask) + 1, dtype=np.int32),
            loss_mask=np.array([0, *mask], np.uint8),
            rewards=np.array([0.0] * len(mask) + [1.0 + number], np.float32),
        )
        for number, mask in enumerate(masks)
    ]
    (made,) = build(documents, [[*range(len(documents))]])
    return made


def test_documents_do_not_see_each_other_and_places_outside_the_loss_get_nothing() -> None:
    batch, values = pack([1, 0, 1], [0, 1]), torch.tensor([0.5, 9.0, 0.25, 9.0, 1.0])
    (found,) = estimated([batch], [values], [], CriticConfig(gamma=0.5))
    assert found.returns is not None and found.values is values
    assert found.returns.tolist() == [0.5, 0.0, 1.0, 0.0, 2.0]
    assert found.advantages.tolist() == [0.0, 0.0, 0.75, 0.0, 1.0]


def test_the_divergence_is_taken_from_each_token_s_reward() -> None:
    batch = replace(pack([1, 0, 1]), reference_logprobs=torch.tensor([-1.0, 5.0, -2.0]))
    config = CriticConfig(kl_coefficient=0.5)
    (found,) = estimated([batch], [torch.zeros(3)], [torch.tensor([-0.5, 0.0, -3.0])], config)
    assert found.advantages.tolist() == [1.25, 0.0, 1.5]  # 1 - 0.5 (-3 + 2), and 0.5 (-0.5 + 1) less before it


def test_lambda_follows_from_the_length_of_each_document() -> None:
    batch = pack([1, 1], [1, 1, 1, 1])
    values = torch.tensor([1.0, 2.0, 1.0, 2.0, 3.0, 4.0])
    (found,) = estimated([batch], [values], [], CriticConfig(lam="length", lam_alpha=0.5))
    # 1 - 1 / (0.5 x 2) = 0 and 1 - 1 / (0.5 x 4) = 0.5; the surprises are 1, -1 and 1, 1, 1, -2
    assert found.advantages.tolist() == [1.0, -1.0, 1.5, 1.0, 0.0, -2.0]
    assert found.returns is not None and found.returns.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_advantages_are_normalized_over_the_tokens_of_all_replicas() -> None:
    values = [torch.tensor([0.5, 9.0, 0.25]), torch.tensor([9.0, 1.0, 3.0])]
    rows = [
        estimated([pack(mask)], [v], [], CriticConfig())[0]
        for mask, v in zip(([1, 0, 1], [0, 1, 1]), values, strict=True)
    ]
    parts = [part for row in rows for part in moments_of([row])]
    found = [normalized([row], parts)[0] for row in rows]
    before = torch.cat([row.advantages[row.loss_mask > 0] for row in rows]).double()
    after = torch.cat([row.advantages[row.loss_mask > 0] for row in found]).double()
    torch.testing.assert_close(after, (before - before.mean()) / before.std(), rtol=1e-5, atol=1e-6)
    assert all(not row.advantages[row.loss_mask == 0].any() for row in found)


def test_a_filler_has_columns_of_zeros() -> None:
    (filler,) = build([], [[]])
    (found,) = estimated([filler], [torch.zeros(1)], [], CriticConfig())
    assert found.returns is not None and not found.returns.any() and not found.advantages.any()


def test_explained_variance_is_that_of_the_returns() -> None:
    returns, values = np.array([1.0, 2.0, 3.0, 6.0]), np.array([1.5, 2.0, 2.0, 5.0])
    errors = returns - values
    sums = {"returns": returns.sum(), "returns_squared": (returns**2).sum(), "value_clipped": 2.0, "steps": 4.0}
    sums |= {"errors": errors.sum(), "errors_squared": (errors**2).sum()}
    found = critic_figures(replace(NOTHING_TRAINED, loss_tokens=8, sums=sums))  # four turns of two tokens
    assert found["value_explained"] == pytest.approx(1 - errors.var() / returns.var())
    assert found["value_clip_fraction"] == 0.25 and found["return_mean"] == 3.0
    still = sums | {"returns": 4.0, "returns_squared": 4.0}
    assert critic_figures(replace(NOTHING_TRAINED, loss_tokens=4, sums=still))["value_explained"] == 0.0
    rounded = sums | {"returns": 3.6, "returns_squared": 4 * (0.81 + 1e-7), "errors_squared": 4e-7, "errors": 0.0}
    assert critic_figures(replace(NOTHING_TRAINED, loss_tokens=4, sums=rounded))["value_explained"] == 0.0
    assert critic_figures(None) == {}
