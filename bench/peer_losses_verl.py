"""verl's part of peer_losses.py: policy losses and advantages cut from its core_algos.py."""

import ast
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peer_losses import GROUP, SAMPLES, TOKENS, row
from torch import Tensor

LOSSES = ("dppo_tv", "dppo_kl", "sapo", "clip_cov", "kl_cov", "geo_mean", "gspo")


def cut(file: Path, names: Sequence[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """These functions of a file, without decorators and annotations, in `namespace`."""
    found = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and n.name in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in [*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.kwarg])]:
            argument.annotation = None
    exec(compile(ast.Module(found, []), str(file), "exec"), namespace)
    return namespace


def core_algos(folder: Path) -> dict[str, Any]:
    """verl's functions by name; its helpers are cut from torch_functional.py."""
    helpers = {"torch": torch}
    masked = ("masked_mean", "masked_sum", "masked_var", "masked_whiten", "clip_by_value")
    cut(folder / "verl/utils/torch_functional.py", masked, helpers)
    names = [f"compute_policy_loss_{name}" for name in LOSSES] + ["agg_loss", "compute_opo_outcome_advantage"]
    names += ["compute_gae_advantage_return", "compute_value_loss"]
    space: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "defaultdict": defaultdict,
        "AlgoConfig": type("AlgoConfig", (), {}),
    }
    space |= {"ActorConfig": SimpleNamespace, "verl_F": SimpleNamespace(**helpers)}
    return cut(folder / "verl/trainer/ppo/core_algos.py", names, space)


class Config(SimpleNamespace):
    """The keys of verl's actor config that its losses read."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl_loss(function: Callable[..., Any], mode: str, **keys: Any) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    def compute(logprobs: Tensor, given: dict[str, Tensor]) -> Tensor:
        low, high = keys.get("low", 0.2), keys.get("high", 0.28)
        options = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0}
        options |= {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5}
        config = Config(
            clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e9, tau_pos=1.0, tau_neg=1.05,
            global_batch_info={}, policy_loss=SimpleNamespace(**options),
        )  # fmt: skip
        advantages = given["advantages"][:, None].expand_as(logprobs) * given["mask"]
        found = function(given["proximal"], logprobs, advantages, given["mask"], mode, config)
        return found[0] if isinstance(found, tuple) else found

    return compute


def verl_losses(folder: Path) -> list[dict[str, Any]]:
    found = core_algos(folder)
    cov = {"objective_options": {"share": 1.0, "least": 0.2, "most": 5.0}, "clip_low": 0.9, "clip_high": 50.0}
    kl = {"objective_options": {"share": 0.1, "coefficient": 0.5}}
    mean = {"reduction": "sequence_mean"}
    small = {"clip_low": 0.01, "clip_high": 0.02}
    rows: list[tuple[str, dict[str, Any], str, dict[str, float]]] = [
        ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.15}, "token-mean", {"low": 0.1, "high": 0.15}),
        ("dppo_kl", small, "token-mean", {"low": 0.01, "high": 0.02}),
        ("sapo", mean, "seq-mean-token-mean", {}),
        ("clip_cov", cov, "token-mean", {"low": 0.9, "high": 50.0}),
        ("kl_cov", kl, "token-mean", {}),
        ("geo_mean", mean | {"clip_low": 0.3, "clip_high": 0.4}, "token-mean", {"low": 0.3, "high": 0.4}),
        ("gspo", mean | {"clip_low": 0.1, "clip_high": 0.15}, "seq-mean-token-mean", {"low": 0.1, "high": 0.15}),
    ]
    out: list[dict[str, Any]] = []
    for name, keys, mode, bounds in rows:
        ours = {"geo_mean": "gmpo"}.get(name, name)
        compute = verl_loss(found[f"compute_policy_loss_{name}"], mode, **bounds)
        made = row("verl", name, {"objective": ours, **keys}, compute)
        if name.startswith("dppo"):
            made["loss"] = None  # A sg[r] log p there, whose gradient is that of r A
        out.append(made)
    return out


def verl_advantages(folder: Path, rewards: np.ndarray) -> list[dict[str, Any]]:
    """OPO of the first reward; samples have from 1 to 12 tokens."""
    lengths = torch.arange(1, len(rewards) + 1)
    mask = (torch.arange(len(rewards))[None] < lengths[:, None]).double()
    scores = torch.zeros_like(mask)
    scores[:, 0] = torch.from_numpy(rewards[:, 0])
    index = np.repeat(np.arange(len(rewards) // GROUP), GROUP)
    found, _ = core_algos(folder)["compute_opo_outcome_advantage"](scores, mask, index)
    row = {"peer": "verl", "name": "opo", "lengths": lengths.tolist(), "reward_weights": [1.0, 0.0]}
    return [row | {"advantages": found[:, 0].tolist()}]


def verl_values(folder: Path) -> dict[str, Any]:
    """GAE with whitened advantages, and the value loss. Masks have gaps; rewards are paid at loss places alone."""
    found = core_algos(folder)
    draw = torch.Generator().manual_seed(31)

    def normal() -> Tensor:
        return torch.randn(SAMPLES, TOKENS, generator=draw, dtype=torch.float64)

    mask = (torch.rand(SAMPLES, TOKENS, generator=draw) < 0.7).double()
    mask[:, 2] = 1.0
    given = {"mask": mask, "values": normal(), "newer": normal(), "targets": normal(), "rewards": normal() * mask}
    rows: list[dict[str, Any]] = []
    for gamma, lam in ((1.0, 1.0), (0.9, 0.5), (1.0, 0.0)):
        made = found["compute_gae_advantage_return"](given["rewards"], given["values"], mask, gamma, lam)
        advantages, returns = (column.tolist() for column in made)
        rows.append({"gamma": gamma, "lam": lam, "advantages": advantages, "returns": returns})
    newer = given["newer"].clone().requires_grad_()
    loss, clipped = found["compute_value_loss"](newer, given["targets"], given["values"], mask, 0.4)
    (gradient,) = torch.autograd.grad(loss, newer)
    inputs = {name: value.tolist() for name, value in given.items()}
    figures = {"clip": 0.4, "loss": loss.item(), "clipped": clipped.item(), "gradient": gradient.tolist()}
    return {"inputs": inputs, "rows": rows, "loss": figures}
