"""A teacher's requests, and what its answers say. Standard library, msgspec and numpy only: a launch checks them too.

vLLM's /v1/completions takes token ids and returns `prompt_logprobs` of them, without a tokenizer and past its prefix
cache. They know no temperature. One further token must be sampled, so a sequence is one token shorter than the
teacher's context.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from common.config.scorers import ScorerConfig
from common.wire_types import INT32_MAX
from rollout_fleet.scorers.requests import SHOWN_CHARS, Answer, ScorerFailed

TOKEN_BYTES = 512  # most of one log-probability in an answer
ROUNDING = 1e-3  # by which a log-probability, or a sum of probabilities, may be too large


@dataclass(frozen=True)
class Taught(Answer):
    """A teacher's answer about T tokens; entry 0 of each array is 0, because nothing comes before the first token."""

    logprobs: np.ndarray  # [T] float32
    top_ids: np.ndarray  # [T, k] int32
    top_logprobs: np.ndarray  # [T, k] float32
    said: str  # the model, as its server names it


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    model: str = ""
    system_fingerprint: str | None = None


def question(scorer: ScorerConfig, tokens: Sequence[int], top_k: int) -> bytes:
    """The JSON of the request for T tokens."""
    body = {**scorer.extra, "model": scorer.model, "prompt": list(tokens), "prompt_logprobs": top_k}
    return json.dumps({**body, "max_tokens": 1, "temperature": 0}).encode()


def taught(answer: bytes, *, tokens: Sequence[int], top_k: int, vocabulary: int) -> Taught:
    """The log-probabilities of `tokens` in an answer. Raises ScorerFailed for one that cannot be true."""
    try:
        found = msgspec.json.decode(answer, type=_Completion)
        (choice,) = found.choices
        return _read(found, choice.prompt_logprobs, tokens=tokens, top_k=top_k, vocabulary=vocabulary)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ScorerFailed(f"{error}: {answer[:SHOWN_CHARS].decode(errors='replace')!r}") from error


def _read(
    found: _Completion,
    rows: Sequence[dict[int, _Logprob] | None],
    *,
    tokens: Sequence[int],
    top_k: int,
    vocabulary: int,
) -> Taught:
    if len(rows) != len(tokens):
        raise ValueError(f"log-probabilities of {len(rows)} tokens, expected {len(tokens)}")
    logprobs = np.zeros(len(tokens), np.float32)
    ids = np.zeros((len(tokens), top_k), np.int32)
    values = np.zeros((len(tokens), top_k), np.float32)
    for place, (row, token) in enumerate(zip(rows[1:], tokens[1:], strict=True), 1):
        if row is None or token not in row:
            raise ValueError(f"no log-probability of token {token} in place {place}")
        if not all(0 <= each < vocabulary for each in row):
            raise ValueError(f"a token outside 0..{vocabulary - 1} in place {place}")
        if not all(math.isfinite(each.logprob) and each.logprob <= ROUNDING for each in row.values()):
            raise ValueError(f"a number that is no log-probability in place {place}")
        logprobs[place] = row[token].logprob
        top = sorted(row.items(), key=lambda pair: -pair[1].logprob)[:top_k]
        if len(top) < top_k:
            raise ValueError(f"{len(top)} tokens in place {place}, expected {top_k}")
        if sum(math.exp(each.logprob) for _, each in top) > 1 + ROUNDING:
            raise ValueError(f"probabilities of more than 1 in place {place}")
        ids[place] = [each for each, _ in top]
        values[place] = [each.logprob for _, each in top]
    version = f" ({found.system_fingerprint})" if found.system_fingerprint else ""
    return Taught(logprobs, ids, values, f"{found.model}{version}")


def vocabulary_of(model: str) -> int:
    """Rows of the output layer of the model in this folder, as its config.json says."""
    return json.loads((Path(model) / "config.json").read_bytes()).get("vocab_size", INT32_MAX)
