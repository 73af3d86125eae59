"""Losses and advantages of TRL and verl on random inputs, for test_peer_losses.py and test_gae.py.

Runs their own code. TRL's `_compute_loss` gets log-probabilities in the place of a model. verl's functions are cut from
its core_algos.py (peer_losses_verl.py), without the rest of verl. Everything is float64. Each row names the
keys of learner.loss that should give the same, the loss, and its gradient by the log-probabilities.

    bench/requirements-trl.txt has TRL's environment; verl needs no installation:
    pip download --no-deps --dest FOLDER verl==0.9.1 && python -m zipfile -e FOLDER/verl-*.whl FOLDER/verl
    python bench/peer_losses.py --verl FOLDER/verl
"""

import argparse
import ast
import inspect
import json
import textwrap
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

RESULT = Path(__file__).parent / "results" / "peer_losses.json"
SAMPLES, TOKENS, MAX_TOKENS = 6, 8, 8
LENGTHS = (8, 3, 5, 1, 6, 8)
GROUP = 4  # samples of one prompt, for advantages


def inputs() -> dict[str, Tensor]:
    """[SAMPLES, TOKENS] each, [SAMPLES] advantages: log-ratios of about +-0.5, and both signs of advantages."""
    draw = torch.Generator().manual_seed(29)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    logprobs = -3 * torch.rand(SAMPLES, TOKENS, generator=draw, dtype=torch.float64) - 0.05
    proximal = (logprobs + 0.5 * normal(SAMPLES, TOKENS)).clamp(max=-0.01)
    mask = (torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]).double()
    reference = (logprobs + 0.5 * normal(SAMPLES, TOKENS)).clamp(max=-0.01)
    return {
        "logprobs": logprobs,
        "proximal": proximal,
        "reference": reference,
        "mask": mask,
        "advantages": normal(SAMPLES),
    }


def row(
    peer: str, name: str, keys: dict[str, Any], compute: Callable[[Tensor, dict[str, Tensor]], Tensor], **more: Any
):
    """One result: `keys` of learner.loss, the loss and the gradient."""
    given = inputs()
    logprobs = given["logprobs"].requires_grad_()
    loss = compute(logprobs, given)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return {"peer": peer, "name": name, "keys": keys, "loss": loss.item(), "gradient": gradient.tolist(), **more}


# ---------------------------------------------------------------- TRL


def trl_loss(trainer: Any, **settings: Any) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """`trainer._compute_loss` with these log-probabilities; `settings` are attributes of the trainer or its `args`."""

    def compute(logprobs: Tensor, given: dict[str, Tensor]) -> Tensor:
        arguments = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "delta": None}
        arguments |= {"use_bias_correction_kl": False, **settings.get("args", {})}
        same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
        own = SimpleNamespace(
            args=SimpleNamespace(steps_per_generation=1, **arguments),
            accelerator=same,
            model=SimpleNamespace(training=True),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logprobs, logprobs.detach().exp(), None),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="token",
            beta=0.0,
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            max_completion_length=MAX_TOKENS,
        )
        vars(own).update({name: value for name, value in settings.items() if name != "args"})
        ids = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
        batch = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": given["mask"],
            "advantages": given["advantages"],
            "old_per_token_logps": given["proximal"],
            "ref_per_token_logps": given["reference"],
            "num_items_in_batch": given["mask"].sum(),
        }
        return trainer._compute_loss(own, None, batch)

    return compute


def trl_losses() -> list[dict[str, Any]]:
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    clip = {"epsilon_low": 0.2, "epsilon_high": 0.28}
    plain = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
    cispo = {"objective": "cispo", "clip_low": 1.0, "clip_high": 1.5}
    gspo = {"objective": "gspo", "clip_low": 0.1, "clip_high": 0.15, "reduction": "sequence_mean"}
    sapo = {"objective": "sapo", "reduction": "sequence_mean"}
    warm = {"objective_options": {"tau_high": 2.0, "tau_low": 3.0}}
    gmpo = {"objective": "gmpo", "clip_low": 0.2, "clip_high": 0.4, "reduction": "sequence_mean"}
    settings: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
        ("dapo", plain, GRPOTrainer, {"loss_type": "dapo", **clip}),
        ("grpo", plain | {"reduction": "sequence_mean"}, GRPOTrainer, {"loss_type": "grpo", **clip}),
        ("dr_grpo", plain | {"reduction": "fixed_length"}, GRPOTrainer, {"loss_type": "dr_grpo", **clip}),
        ("kl", plain | {"kl_coefficient": 0.1}, GRPOTrainer, {"loss_type": "dapo", "beta": 0.1, **clip}),
        ("cispo", cispo, GRPOTrainer, {"loss_type": "cispo", "epsilon_low": 0.0, "epsilon_high": 2.5}),
        (
            "gspo",
            gspo,
            GRPOTrainer,
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
        ),
        ("sapo", sapo, GRPOTrainer, {"loss_type": "sapo"}),
        (
            "sapo, other temperatures",
            sapo | warm,
            GRPOTrainer,
            {"loss_type": "sapo", "args": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}},
        ),
        ("gmpo", gmpo, GMPOTrainer, {"epsilon_low": 0.2, "epsilon_high": 0.4, "loss_type": "grpo"}),
    ]
    return [row("trl", name, keys, trl_loss(kind, **own)) for name, keys, kind, own in settings]


def trl_advantages(rewards: np.ndarray) -> list[dict[str, Any]]:
    """`rewards`: [groups x GROUP, 2]. The branches of TRL's trainer that make advantages of them, as they are."""
    from trl import GRPOTrainer
    from trl.trainer.utils import nanstd

    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    tests = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If))
    branch = next(node for node in tests if "sum_then_normalize" in ast.unparse(node.test))
    code = compile(ast.Module([branch], []), "grpo_trainer.py", "exec")
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    out: list[dict[str, Any]] = []
    kinds = {"grpo": ("sum_then_normalize", "group"), "dr_grpo": ("sum_then_normalize", "none")}
    kinds |= {"gdpo": ("normalize_then_sum", "group")}
    for name, (aggregation, scale) in kinds.items():
        own = SimpleNamespace(
            multi_objective_aggregation=aggregation, scale_rewards=scale, reward_weights=weights, reward_funcs=[0, 1]
        )
        given = torch.from_numpy(rewards)
        names = {"self": own, "torch": torch, "nanstd": nanstd, "rewards_per_func": given, "device": given.device}
        names |= {"num_generations": GROUP, "unscorable_mask": torch.isnan(given).all(1)}
        exec(code, names)
        out.append({"peer": "trl", "name": name, "eps": 1e-4, "advantages": names["advantages"].tolist()})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="the unpacked wheel of verl; without it only TRL is compared")
    args = parser.parse_args()
    draw = np.random.default_rng(29)
    rewards = np.stack([draw.integers(0, 2, 3 * GROUP).astype(float), draw.random(3 * GROUP)], 1)
    result: dict[str, Any] = {
        "versions": {"trl": version("trl"), "torch": version("torch")},
        "max_tokens": MAX_TOKENS,
        "group": GROUP,
        "inputs": {name: value.tolist() for name, value in inputs().items()},
        "rewards": rewards.tolist(),
        "reward_weights": [1.0, 0.5],
        "losses": trl_losses(),
        "advantages": trl_advantages(rewards),
    }
    if args.verl is not None:
        from peer_losses_verl import verl_advantages, verl_losses, verl_values

        result["losses"] += verl_losses(args.verl)
        result["advantages"] += verl_advantages(args.verl, rewards)
        result["values"] = verl_values(args.verl)
        result["versions"]["verl"] = next(args.verl.glob("verl-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(result['losses'])} losses and {len(result['advantages'])} advantages in {RESULT}")


if __name__ == "__main__":
    main()
