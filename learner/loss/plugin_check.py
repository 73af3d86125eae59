"""Checks of the parts that a config names by import path: `python -m learner.loss.plugin_check < CONFIG.json`.

It prints a JSON list of problems. Every rank of the learner calls `check` when it starts. A part is tried in float64 on
a small batch of six documents with prompts, expired tokens and advantages of both signs:

- it can be imported, and takes its arguments and options;
- its numbers are finite, also in float32 at log-ratios of +-50;
- its gradient agrees with finite differences, and is not zero everywhere;
- documents in one microbatch, each in its own, and in two halves give the same loss;
- tokens outside the loss change nothing.

Results without gradient (`detach`, `no_grad`, `item`) are constants when differences are taken.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.config.loss import plugins
from common.config.loss_keys import LossConfig
from common.config.schema import Config
from common.errors import ConfigError, Problem
from learner.backend_protocol import LossOutput, Microbatch
from learner.loss.losses import policy_loss
from learner.loss.plugins import ELSEWHERE, part
from learner.loss.types import AdvantageEstimator, GroupRewards

MAX_TOKENS = 7
LENGTHS = (4, 3, 5, 2, 1, 3)
HALVES = ((0, 1, 2), (3, 4, 5))
OUTSIDE = (0, 5, 14)  # places that are not in the loss; the whole of the fifth document is outside
STEP = 1e-6  # step of finite differences
CLOSE = 1e-9  # relative difference that rounding in float64 may leave
STEEP = 1e-5  # difference of a derivative that finite differences may leave, relative to the largest one
EXTREME = 50.0  # log-ratio


class Wrong(Exception):
    """A check failed; the message says which, with its numbers."""


# ---------------------------------------------------------------- the small batch


@dataclass(frozen=True)
class Trial:
    """A microbatch with its differentiable inputs, [T] each."""

    batch: Microbatch
    logprobs: Tensor
    entropy: Tensor

    def documents(self, numbers: Sequence[int]) -> "Trial":
        """Some of its documents, packed."""
        ends = np.cumsum(self.batch.document_lengths).tolist()
        places = [t for n in numbers for t in range(ends[n] - self.batch.document_lengths[n], ends[n])]
        index = torch.tensor(places)
        columns = {name: x[index] for name, x in vars(self.batch).items() if isinstance(x, Tensor)}
        lengths = tuple(self.batch.document_lengths[n] for n in numbers)
        return Trial(
            replace(self.batch, document_lengths=lengths, **columns), self.logprobs[index], self.entropy[index]
        )


def trial(dtype: torch.dtype = torch.float64, reference: bool = False) -> Trial:
    """Always the same batch: log-ratios of about +-0.3 to the sampler and, where there is one, to the reference."""
    draw = torch.Generator().manual_seed(29)
    count = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=draw, dtype=dtype)

    logprobs = -0.2 - 2.0 * torch.rand(count, generator=draw, dtype=dtype)
    mask = torch.ones(count, dtype=dtype)
    mask[list(OUTSIDE)] = 0.0
    ids = torch.zeros(count, dtype=torch.int64)
    each = torch.tensor([1.3, -0.7, 0.4, -1.5, 9.0, 0.9], dtype=dtype)
    batch = Microbatch(
        tokens=ids,
        targets=ids,
        positions=torch.cat([torch.arange(n) for n in LENGTHS]),
        document_lengths=LENGTHS,
        loss_mask=mask,
        advantages=each.repeat_interleave(torch.tensor(LENGTHS)),
        behavior_logprobs=logprobs + noise(0.3),
        staleness=torch.arange(count, dtype=torch.int32) % 4,
        reference_logprobs=logprobs + noise(0.3) if reference else None,
    )
    return Trial(batch, logprobs, torch.rand(count, generator=draw, dtype=dtype))


def extreme(reference: bool) -> Trial:
    """In float32, with log-ratios of +-50 to the sampler and to the reference."""
    made = trial(torch.float32)
    far = EXTREME * torch.tensor([1.0, -1.0]).repeat(sum(LENGTHS))[: sum(LENGTHS)]
    compared = made.logprobs + far if reference else None
    batch = replace(made.batch, behavior_logprobs=made.logprobs - far, reference_logprobs=compared)
    return replace(made, batch=batch)


def spoiled(reference: bool) -> Trial:
    """The batch with absurd advantages and ages outside the loss."""
    made = trial(reference=reference)
    advantages, staleness = made.batch.advantages.clone(), torch.as_tensor(made.batch.staleness).clone()
    advantages[list(OUTSIDE)] = 1e6
    staleness[list(OUTSIDE)] = 10_000
    return replace(made, batch=replace(made.batch, advantages=advantages, staleness=staleness))


# ---------------------------------------------------------------- parts of the loss


class Fixed(TorchFunctionMode):
    """Within, results without gradient are what they were the first time: an ordinary function remains."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[Any] = []
        self._at: int | None = None  # None: the first time

    def again(self) -> "Fixed":
        self._at = 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        several = found if isinstance(found, tuple | list) else (found,)
        if any(isinstance(each, Tensor) and each.requires_grad for each in several):
            return found
        if self._at is None:
            self._seen.append(found.clone() if isinstance(found, Tensor) else found)
            return found
        kept = self._seen[self._at]
        self._at += 1
        return kept.clone() if isinstance(kept, Tensor) else kept


def loss_config(kind: str, name: str, config: LossConfig) -> LossConfig:
    """A loss with this part, in which it has most to do, and nothing else of the job's but its bounds and options."""
    shared = {"clip_low": config.clip_low, "clip_high": config.clip_high, "clip_dual": config.clip_dual}
    made: dict[str, dict[str, Any]] = {
        "objective": {"proximal": "behavior", "correction": "none", "objective_options": config.objective_options}
        | shared,
        "correction": {
            "correction_level": config.correction_level,
            "correction_low": config.correction_low,
            "correction_cap": config.correction_cap,
            "correction_normalize": config.correction_normalize,
        },
        "reduction": {"correction_normalize": config.correction_normalize},
        "kl_estimator": {"kl_coefficient": 1.0, "proximal": "behavior", "correction": "none"},
    }
    return LossConfig(**{kind: name}, **made[kind])


def check_loss(kind: str, config: LossConfig) -> None:
    """Raise Wrong, with the numbers, for the first check that a part of the loss does not pass."""
    run = policy_loss(config, MAX_TOKENS)

    def loss(made: Trial) -> LossOutput:
        out = run(made.logprobs, made.entropy, made.batch)
        if out.denominator is None or out.denominator.dim() or out.loss_sum.dim():
            raise Wrong("a loss and a denominator are one number each for a microbatch")
        return out

    compares = kind == "kl_estimator"
    whole, far = trial(reference=compares), extreme(compares)
    with torch.no_grad():
        _finite(loss(whole), "in float64")
        _finite(loss(far), f"in float32 at log-ratios of +-{EXTREME:g}; bounded_exp bounds exp")
        expected = _mean([loss(whole)])
        ways = {
            "each document in a microbatch of its own": [whole.documents([n]) for n in range(len(LENGTHS))],
            "two halves in microbatches of their own": [whole.documents(numbers) for numbers in HALVES],
            "other numbers outside the loss": [spoiled(compares)],
        }
        if not _close(found := _mean([loss(whole)]), expected):
            raise Wrong(f"the same microbatch has the loss {expected:.9g} and then {found:.9g}")
        for words, parts in ways.items():
            if not _close(found := _mean([loss(each) for each in parts]), expected):
                why = "a part must divide by nothing that it finds in its microbatch"
                raise Wrong(f"one microbatch has the loss {expected:.9g}, {words} {found:.9g}; {why}")
    _gradient(loss, whole)
    inputs = far.logprobs.clone().requires_grad_()
    slope = torch.autograd.grad(loss(replace(far, logprobs=inputs)).loss_sum, inputs, materialize_grads=True)[0]
    if not torch.isfinite(slope).all():
        raise Wrong(f"the gradient is not finite in float32 at log-ratios of +-{EXTREME:g}; bounded_exp bounds exp")
    if compares:
        same = replace(whole, batch=replace(whole.batch, reference_logprobs=whole.logprobs))
        if abs(found := loss(same).sums["kl"].item() / len(whole.logprobs)) > CLOSE:
            raise Wrong(f"the divergence of a policy from itself is {found:.6g} and not 0")


def _finite(out: LossOutput, where: str) -> None:
    numbers = {"loss": out.loss_sum, "denominator": out.denominator, **out.sums}
    for name, value in numbers.items():
        if value is not None and not torch.isfinite(value).all():
            raise Wrong(f"{name} is {value.sum().item()} {where}")


def _mean(outs: Sequence[LossOutput]) -> float:
    """The loss of microbatches as the backend divides it: the sum of sums over the sum of denominators."""
    divisor = math.fsum(float(out.denominator) for out in outs if out.denominator is not None)
    if divisor <= 0:
        raise Wrong(f"the denominator is {divisor:g}, expected a number above 0")
    return math.fsum(float(out.loss_sum) for out in outs) / divisor


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(1.0, abs(one), abs(other))


def _gradient(loss: Callable[[Trial], LossOutput], whole: Trial) -> None:
    """Compare the gradient with central differences, place by place."""
    fixed = Fixed()
    inputs = whole.logprobs.clone().requires_grad_()
    with fixed:
        total = loss(replace(whole, logprobs=inputs)).loss_sum
    if not total.requires_grad:
        raise Wrong("the loss has no gradient: nothing in it depends on the policy's log-probabilities")
    slope = torch.autograd.grad(total, inputs, materialize_grads=True)[0]
    if not torch.isfinite(slope).all():
        raise Wrong(f"the gradient is {slope[~torch.isfinite(slope)][0].item()} at a place")
    if not slope.any():
        raise Wrong("the gradient is 0 everywhere, so nothing would be learned")

    def at(place: int, step: float) -> float:
        moved = whole.logprobs.clone()
        moved[place] += step
        moved.requires_grad_()
        with fixed.again():
            total = loss(replace(whole, logprobs=moved)).loss_sum
        return float(total.detach())

    allowed = STEEP * (1.0 + float(slope.abs().max()))
    for place in range(len(slope)):
        found = (at(place, STEP) - at(place, -STEP)) / (2 * STEP)
        if not abs(found - float(slope[place])) <= allowed:
            differs = f"the gradient at place {place} is {float(slope[place]):.6g}, finite differences give {found:.6g}"
            raise Wrong(differs)


# ---------------------------------------------------------------- advantages


class AnyName(dict[str, np.ndarray]):
    """Numbers of an environment that has every name that a part asks for."""

    def __init__(self, totals: np.ndarray) -> None:
        super().__init__(first=totals, second=np.round(totals / 2 + 0.1, 1))

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> np.ndarray:
        return self["first" if len(name) % 2 else "second"]


def rewards() -> list[GroupRewards]:
    """Groups of four samples: one of successes and failures, one with a failed sample, one whose rewards are equal."""
    totals = ([1.0, 0.0, 0.0, 1.0], [0.25, math.nan, 2.0, 1.0], [1.0] * 4)
    return [_group(np.array(row), np.arange(4) + 3 + shift) for shift, row in enumerate(totals)]


def _group(totals: np.ndarray, lengths: np.ndarray) -> GroupRewards:
    for array in (totals, lengths):
        array.setflags(write=False)
    return GroupRewards(totals, lengths, AnyName(totals))


def check_advantage(estimate: AdvantageEstimator) -> None:
    """Raise Wrong, with the numbers, for the first check that an estimator does not pass."""
    groups = rewards()
    found = estimate(groups)
    if len(found) != len(groups):
        raise Wrong(f"{len(found)} groups of advantages for {len(groups)} groups of rewards")
    for group, own in zip(groups, found, strict=True):
        if np.shape(own) != group.totals.shape:
            raise Wrong(f"advantages of the shape {np.shape(own)} for {len(group.totals)} samples")
        if not np.isfinite(own).all():
            raise Wrong(f"the advantages of the rewards {group.totals.tolist()} are {np.asarray(own).tolist()}")
        if np.asarray(own)[np.isnan(group.totals)].any():
            raise Wrong(f"a failed sample has an advantage: {np.asarray(own).tolist()}")
    if not any(np.asarray(own).any() for own in found):
        raise Wrong("every advantage is 0, so nothing would be learned")
    nothing = estimate([_group(np.full(4, math.nan), np.arange(4))])
    if np.shape(nothing) != (1, 4) or np.asarray(nothing).any():
        raise Wrong(f"a group whose samples have all failed has the advantages {nothing}")
    _same(found[::-1], estimate(groups[::-1]), "the same groups in another order")
    turned = [_chosen(group, np.arange(4)[::-1]) for group in groups]
    _same([np.asarray(own)[::-1] for own in found], estimate(turned), "the same samples in another order")
    good = [np.flatnonzero(~np.isnan(group.totals)) for group in groups]
    kept = [np.asarray(own)[places] for own, places in zip(found, good, strict=True)]
    without = [_chosen(group, places) for group, places in zip(groups, good, strict=True)]
    _same(kept, estimate(without), "the same groups without their failed samples")


def _chosen(group: GroupRewards, places: np.ndarray) -> GroupRewards:
    return _group(group.totals[places], group.lengths[places])


def _same(expected: Sequence[np.ndarray], found: Sequence[np.ndarray], words: str) -> None:
    for one, other in zip(expected, found, strict=True):
        if np.shape(one) != np.shape(other) or not np.allclose(one, other, rtol=CLOSE, atol=CLOSE):
            shown = np.asarray(one).round(6).tolist(), np.asarray(other).round(6).tolist()
            raise Wrong(f"{words} have the advantages {shown[1]} and not {shown[0]}")


# ---------------------------------------------------------------- of a job


def check(config: Config, file: str = "config") -> None:
    """Raise ConfigError for the first part that cannot be used, naming its key and what is wrong with it."""
    for problem in found_problems(config, file):
        raise ConfigError.of(file, problem)


def found_problems(config: Config, file: str = "config", *, elsewhere: bool = False) -> Iterator[Problem]:
    """The problems of the parts that the config names by import path; `elsewhere`: as in plugins.ask."""
    for key, name in plugins(config).items():
        kind = key.rpartition(".")[2]
        of_source = key.split(".")[2] if key.startswith("tasks.sources.") else ""
        loss = (config.sources[of_source] if of_source else config).learner.loss
        try:
            _check_one(kind, name, loss, key=key, file=file)
        except ConfigError as error:
            if elsewhere and isinstance(error.__cause__, ImportError):
                continue
            yield Problem(error.key, error.expected, error.found, error.hint)
        except Wrong as error:
            yield Problem(key, f"a part that passes the checks of docs/losses.md ({name})", str(error))
        except Exception as error:  # a part of anybody's may raise anything
            words = f"{type(error).__name__}: {error}"
            yield Problem(key, f"a part that passes the checks of docs/losses.md ({name})", f"one that raises {words}")


def _check_one(kind: str, name: str, loss: LossConfig, *, key: str, file: str) -> None:
    options = {"objective": loss.objective_options, "advantage": loss.advantage_options}.get(kind, {})
    found = part(kind, name, {}, options, key=key, file=file)
    if kind == "advantage":
        check_advantage(found)
    else:
        check_loss(kind, loss_config(kind, name, loss))


def main() -> int:
    """Standard output has the answer alone: what the parts print goes to standard error."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    with contextlib.redirect_stdout(sys.stderr):
        found = list(found_problems(config, elsewhere=ELSEWHERE in sys.argv))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
