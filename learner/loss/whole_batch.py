"""Objectives that compare a token with all tokens of the batch: which tokens they mark, the same on every rank.

    every replica: one forward pass -> `tokens_of`: its loss tokens, by document
                   all replicas' tokens -> `choose`: [N] bool over the batch, computed alike everywhere
                   -> `with_marks`: Microbatch.marked, which the objective reads

The pass costs a third of a step. It says what the policy at the start of the step thinks of the tokens, as the pass
that trains does. The tokens are put in the order of the documents' numbers, and draws follow from (seed, step). So the
marks do not depend on packing or on the number of replicas, up to ties and to the rounding of log-probabilities.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from common.config.loss import MARK_OPTIONS, MARKING
from common.config.schema import LossConfig
from learner.backend_protocol import Microbatch
from learner.loss.losses import PROXIMALS

COLUMNS = 3  # logprobs, proximal_logprobs, advantages
BYTES = 8  # size of a float64
Tokens = dict[int, bytes]  # [COLUMNS, n] float64 of a document's n loss tokens, by its number in the batch


@dataclass(frozen=True)
class BatchTokens:
    """The loss tokens of the whole batch, [N] float64 each."""

    logprobs: np.ndarray  # those of the policy at the start of the step
    proximal_logprobs: np.ndarray  # those of the policy that the trust region surrounds
    advantages: np.ndarray
    draws: np.ndarray  # in [0, 1)

    @property
    def covariances(self) -> np.ndarray:
        """[N] (log p - mean(log p)) (A - mean(A)), whose sum over the batch drives its entropy down.

        The Entropy Mechanism of RL (arXiv 2505.22617), section 4.1.
        """
        return (self.logprobs - self.logprobs.mean()) * (self.advantages - self.advantages.mean())


def clip_cov(tokens: BatchTokens, *, share: float = 2e-4, least: float = 1.0, most: float = 5.0) -> np.ndarray:
    """[N] bool: of the tokens whose covariance is between `least` and `most`, at most `share` of all, drawn.

    At least one is drawn if there is any. Clip-Cov (arXiv 2505.22617), section 4.2; the defaults are verl's, which
    draws within a microbatch and leaves out tokens that the ratio's bounds clip.
    """
    covariance = tokens.covariances
    inside = np.flatnonzero((covariance > least) & (covariance < most))
    return _of(inside[np.argsort(tokens.draws[inside], kind="stable")][: _count(share, len(covariance))], covariance)


def kl_cov(tokens: BatchTokens, *, share: float = 2e-4) -> np.ndarray:
    """[N] bool: the `share` of all tokens with the largest covariance, at least one of them.

    KL-Cov (arXiv 2505.22617), section 4.2; the default is verl's.
    """
    covariance = tokens.covariances
    return _of(np.argsort(-covariance, kind="stable")[: _count(share, len(covariance))], covariance)


def m2po(tokens: BatchTokens, *, moment: float = 0.04) -> np.ndarray:
    """[N] bool: the fewest tokens of largest (log r)^2 without which its mean is below `moment`; one token stays.

    M2PO (arXiv 2510.01161), algorithm 1; the default is its and AReaL's.
    """
    squares = (tokens.logprobs - tokens.proximal_logprobs) ** 2
    order = np.argsort(-squares, kind="stable")
    counts = np.arange(len(squares), 0, -1)
    means = np.cumsum(squares[order][::-1])[::-1] / counts  # means of the tokens that stay when i are marked
    enough = np.flatnonzero(means < moment)
    return _of(order[: enough[0] if len(enough) else len(squares) - 1], squares)


MARKS: dict[str, Callable[..., np.ndarray]] = {"clip_cov": clip_cov, "kl_cov": kl_cov, "m2po": m2po}


def _count(share: float, tokens: int) -> int:
    return max(1, int(share * tokens))


def _of(places: np.ndarray, like: np.ndarray) -> np.ndarray:
    found = np.zeros(len(like), dtype=bool)
    found[places] = True
    return found


def marks(config: LossConfig) -> bool:
    """Whether the objective needs the marks of the whole batch."""
    return config.objective in MARKING


def tokens_of(config: LossConfig, microbatches: Sequence[Microbatch], logprobs: Sequence[Tensor]) -> Tokens:
    """A replica's loss tokens; `logprobs`: [T] of each microbatch, as Backend.logprobs returns them."""
    found: Tokens = {}
    for batch, current in zip(microbatches, logprobs, strict=True):
        behavior = batch.behavior_logprobs
        proximal = PROXIMALS[config.proximal](current.to(behavior.dtype), behavior, batch.staleness)
        rows = torch.stack([current.double(), proximal.double(), batch.advantages.double()]).numpy()
        for number, (start, end) in zip(batch.numbers, _spans(batch), strict=False):  # a filler has no number
            mask = batch.loss_mask[start:end].numpy() > 0
            found[number] = np.ascontiguousarray(rows[:, start:end][:, mask]).tobytes()
    return found


def choose(config: LossConfig, parts: Iterable[Tokens], seed: tuple[int, int]) -> dict[int, np.ndarray]:
    """[n] bool of each document's loss tokens by its number; `parts`: those of every replica, `seed`: (seed, step)."""
    documents = {number: data for part in parts for number, data in part.items()}
    numbers = sorted(documents)
    counts = [len(documents[number]) // (COLUMNS * BYTES) for number in numbers]
    if not any(counts):
        return {number: np.zeros(0, dtype=bool) for number in numbers}
    full = [np.frombuffer(documents[number]).reshape(COLUMNS, -1) for number in numbers if documents[number]]
    logprobs, proximal, advantages = np.concatenate(full, axis=1)
    options = {name: value for name, value in config.objective_options.items() if name in MARK_OPTIONS}
    draws = np.random.Generator(np.random.PCG64(seed)).random(len(logprobs))
    found = MARKS[config.objective](BatchTokens(logprobs, proximal, advantages, draws), **options)
    return dict(zip(numbers, np.split(found, np.cumsum(counts)[:-1]), strict=True))


def with_marks(batch: Microbatch, chosen: Mapping[int, np.ndarray]) -> Microbatch:
    """The microbatch with `marked`; places outside the loss have no mark."""
    marked = torch.zeros(len(batch.targets), dtype=torch.bool)
    for number, (start, end) in zip(batch.numbers, _spans(batch), strict=False):
        mask = batch.loss_mask[start:end] > 0
        marked[start:end][mask] = torch.from_numpy(chosen[number])
    return replace(batch, marked=marked)


def _spans(batch: Microbatch) -> list[tuple[int, int]]:
    ends = np.cumsum(batch.document_lengths).tolist()
    return [(end - length, end) for end, length in zip(ends, batch.document_lengths, strict=True)]


def encode(tokens: Tokens) -> bytes:
    return msgspec.msgpack.encode(tokens)


def decode(data: bytes) -> Tokens:
    """The argument of `encode`; b'' is nothing."""
    return msgspec.msgpack.decode(data, type=Tokens) if data else {}
