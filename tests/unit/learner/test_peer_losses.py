"""Our losses and advantages against those of TRL and verl, on the random inputs of bench/peer_losses.py, in float64."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.config.loss_keys import LossConfig
from learner.backend_protocol import Microbatch
from learner.loss import whole_batch
from learner.loss.advantages import ADVANTAGES
from learner.loss.losses import policy_loss
from learner.loss.plugins import part
from learner.loss.types import GroupRewards
from tests.rigs.processes import ROOT

PEERS: dict[str, Any] = json.loads((ROOT / "bench" / "results" / "peer_losses.json").read_text())
LOSSES = {f"{row['peer']} {row['name']}": row for row in PEERS["losses"]}
ADVANTAGE_ROWS = {f"{row['peer']} {row['name']}": row for row in PEERS["advantages"]}


def microbatch() -> tuple[Microbatch, torch.Tensor]:
    """(The peers' padded samples, packed; [T] places in the padded rows.)"""
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in PEERS["inputs"].items()}
    places = given["mask"].bool()
    lengths = tuple(places.sum(1).tolist())
    columns = {name: given[name][places] for name in ("proximal", "reference")}
    ids = torch.zeros(sum(lengths), dtype=torch.int64)
    batch = Microbatch(
        tokens=ids,
        targets=ids,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        document_lengths=lengths,
        loss_mask=torch.ones(len(ids), dtype=torch.float64),
        advantages=given["advantages"].repeat_interleave(torch.tensor(lengths)),
        behavior_logprobs=columns["proximal"],
        staleness=torch.zeros(len(ids), dtype=torch.int32),
        reference_logprobs=columns["reference"],
        numbers=tuple(range(len(lengths))),
    )
    return batch, places


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_are_the_peers(name: str) -> None:
    row = LOSSES[name]
    keys = {"proximal": "behavior", "correction": "none", **row["keys"]}
    config = msgspec.convert(keys, LossConfig)
    batch, places = microbatch()
    logprobs = torch.tensor(PEERS["inputs"]["logprobs"], dtype=torch.float64)[places].requires_grad_()
    if whole_batch.marks(config):
        tokens = whole_batch.tokens_of(config, [batch], [logprobs.detach()])
        batch = whole_batch.with_marks(batch, whole_batch.choose(config, [tokens], (0, 0)))
        assert batch.marked is not None and 0 < batch.marked.sum() < len(logprobs)
    out = policy_loss(config, PEERS["max_tokens"])(logprobs, None, batch)
    assert out.denominator is not None
    loss = out.loss_sum / out.denominator
    close = {"rtol": 1e-6, "atol": 1e-8}  # verl adds 1e-8 to counts, and TRL has sapo's 1.05 in float32
    if row["loss"] is not None:
        torch.testing.assert_close(loss.detach(), torch.tensor(row["loss"], dtype=torch.float64), **close)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    wanted = torch.tensor(row["gradient"], dtype=torch.float64)
    assert not wanted[~places].any()
    torch.testing.assert_close(gradient, wanted[places], **close)


@pytest.mark.parametrize("name", ADVANTAGE_ROWS)
def test_advantages_are_the_peers(name: str) -> None:
    row = ADVANTAGE_ROWS[name]
    rewards = np.array(PEERS["rewards"])
    lengths = np.array(row.get("lengths", [1] * len(rewards)))
    weights = np.array(row.get("reward_weights", PEERS["reward_weights"]))
    size = PEERS["group"]
    groups = [
        GroupRewards(
            rewards[start : start + size] @ weights,
            lengths[start : start + size],
            {"right": rewards[start : start + size, 0], "short": rewards[start : start + size, 1]},
        )
        for start in range(0, len(rewards), size)
    ]
    ours = row.get("ours", row["name"])
    options = {"gdpo": dict(zip(("right", "short"), weights.tolist(), strict=True))}.get(ours, row.get("options", {}))
    found = np.concatenate(part("advantage", ours, ADVANTAGES, options)(groups))
    loose = 5e-3 if ours == "grpo" else 1e-6  # TRL adds another epsilon to grpo's deviation, and rounds gdpo's
    np.testing.assert_allclose(found, np.array(row["advantages"]), rtol=loose, atol=1e-12)
