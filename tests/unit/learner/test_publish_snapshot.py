"""Snapshots of exported weights in the engines' dtypes."""

import torch

from common.weights import packing
from learner.publish.snapshot import SnapshotMaker


def test_weights_are_rounded_to_the_engines_dtype_and_expert_biases_are_not() -> None:
    bias = torch.tensor([0.5 + 1e-3, -0.25])
    named = [("layers.0.mlp.gate.weight", bias), ("layers.0.mlp.gate.e_score_correction_bias", bias)]
    maker = SnapshotMaker("bfloat16")
    for version in (1, 2):  # the first makes the layout, the others follow it
        snapshot = maker.make(version, iter(named), None)
        held = dict(packing.view(snapshot.flat, snapshot.layout))
        assert torch.equal(held["layers.0.mlp.gate.weight"], bias.bfloat16())
        assert held["layers.0.mlp.gate.e_score_correction_bias"].dtype == torch.float32
        assert torch.equal(held["layers.0.mlp.gate.e_score_correction_bias"], bias)
