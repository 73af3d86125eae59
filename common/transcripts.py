"""A transcript: one episode as people read it. RUN/transcripts has one JSON line for each; docs/transcripts.md.

The learner makes those of its steps, and nodes those of groups that failed.
"""

import logging
import math
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from common.rollouts import Branch, Group, Sample

logger = logging.getLogger(__name__)

FAILED_BYTES = 256 << 10  # Limit of a transcript that a node sends with a group that failed.
SentTranscript = tuple[int, str, bytes]  # serial, node id, and JSON of a Transcript that the node made
Why = Literal["share", "best", "worst", "longest", "failed"]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoders return it for a part of a character
LONGEST_CHARACTER = 32  # tokens; beyond, the bytes are no text
REMEMBERED = 1 << 15  # texts of neighbours, a few MiB
LEAST_TOKEN_BYTES = 16  # A line has more per token.
DIGITS = 5  # behind the point of log-probabilities and ratios
REASON_CHARS = 2000


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of tokens by one author. The lists have one entry per token, or none at all."""

    author: Literal["prompt", "policy", "environment"]
    text: str
    tokens: list[int]
    pieces: list[str]  # the text of each token; a character of several tokens is in the last
    logprobs: list[float] = []  # behavior_logprobs; only in a policy's turn, as are the lists below
    # exp(logprobs - behavior_logprobs) at the step that trained it, before its update; 1 outside the loss
    ratios: list[float] = []
    trained: list[int] = []  # 1 where the token was in the loss
    version_runs: list[tuple[int, int]] = []  # (index in this turn, policy version from there on)
    reward: float | None = None  # the environment gave it for a policy's turn
    cut_before: int = 0  # tokens left out just before this turn, which may be the second part of one
    path: int = 0  # 0: the sample's own conversation; n: its n-th branch, from where it leaves an earlier one
    name: str = ""  # the sub-agent's


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    serial: int  # its task's
    sample: int  # index in its group
    node_id: str
    time_s: float  # Unix time at which the line was written
    why: list[Why]
    turns: list[Turn]
    reward: float = 0.0
    stop_reason: str = ""
    error: str | None = None  # why it failed
    step: int | None = None  # that trained it; None: its whole group failed, or was filtered
    advantage: float | None = None  # None: nothing trained, or every token had its own, from a critic
    metrics: dict[str, float] = {}  # the environment reports them
    notes: dict[str, str] = {}  # a scorer's model and its answer, by the scorer's name
    sampled_tokens: int = 0
    cut_tokens: int = 0  # left out in the middle, because the transcript was too long
    source: str = ""  # the task's, in a job of several sources


class TokenText:
    """The text of each token. Neighbours that were seen are not decoded again."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """`decode`: a tokenizer's, special tokens included."""
        self._decode = decode
        self._remembered = lru_cache(REMEMBERED)(lambda *tokens: decode(list(tokens)))

    def pieces(self, tokens: list[int]) -> list[str]:
        """[n] texts whose concatenation is the text of all tokens. A character of several tokens is in its last one."""
        text = self._decode(tokens)
        out = list[str]()
        before = 0
        begin = 0
        for end in range(1, len(tokens) + 1):  # the tokens from `begin` on may be an unfinished character
            known = self._remembered(*tokens[before:begin]) if begin else ""
            piece = self._remembered(*tokens[before:end])[len(known) :]  # decoders may drop the space of the first one
            if piece.endswith(UNFINISHED) and end < len(tokens) and end - begin < LONGEST_CHARACTER:
                out.append("")
                continue
            out.append(piece)
            before, begin = begin, end
        return out if "".join(out) == text else [""] * (len(tokens) - 1) + [text]


@dataclass(frozen=True)
class Training:
    """A step's figures of a path of T tokens."""

    trained: np.ndarray  # [T] uint8, 1 where the token was in the loss
    advantage: float | None  # None: every token has its own, from a critic
    ratios: np.ndarray | None = None  # [T] float32, 1 where the token was not in the loss; None: not known


class _Stretch(NamedTuple):  # tokens [start, end) of one author
    author: Literal["prompt", "policy", "environment"]
    start: int
    end: int
    reward: float | None = None
    path: int = 0


def transcript_line(
    sample: Sample, text: TokenText, limit_bytes: int, training: Mapping[int, Training] | None = None, /, **facts: Any
) -> bytes:
    """The JSON line of a sample's transcript, cut in its middle to at most `limit_bytes`.

    `training`: by path, of those that trained. `facts`: serial, sample, node_id, why, step and source of the
    Transcript. Raises ValueError for a sample that contradicts itself or does not fit, and whatever the tokenizer
    raises.
    """
    training = training or {}
    parts = list(_stretches(sample))
    length = sum(part.end - part.start for part in parts)
    keep = min(length, limit_bytes // LEAST_TOKEN_BYTES)
    facts |= {
        "time_s": time.time(),
        "reward": sample.reward if math.isfinite(sample.reward) else 0.0,
        "stop_reason": sample.stop_reason[:REASON_CHARS],
        "error": sample.error and sample.error[:REASON_CHARS],
        "advantage": next((one.advantage for one in training.values()), None),
        "notes": sample.notes,
        "metrics": {name: value for name, value in sample.metrics.items() if math.isfinite(value)},
        "sampled_tokens": sample.sampled_all,
    }
    while True:
        turns = list(_turns(sample, parts, keep, text=text, training=training))
        line = msgspec.json.encode(Transcript(turns=turns, cut_tokens=length - keep, **facts)) + b"\n"
        if len(line) <= limit_bytes:
            return line
        if not keep:
            raise ValueError(f"a transcript of {len(line)} bytes without its tokens")
        keep = keep * limit_bytes * 9 // (len(line) * 10)


def _stretches(sample: Sample) -> Iterator[_Stretch]:
    """The authors of a sample's tokens, path by path; a branch from where it leaves an earlier path."""
    seen: list[bytes] = []  # the tokens of earlier paths, sorted: the one that shares most is a neighbour
    for number, path in enumerate(sample.paths):
        tokens = path.tokens.numpy().astype(">i4").tobytes()
        place = bisect(seen, tokens)
        shared = max((_shared(tokens, other) for other in seen[max(place - 1, 0) : place + 1]), default=0)
        own = [*path.loss_mask.numpy().nonzero()[0][:1].tolist(), *(start for start, _ in path.turn_spans[-1:])]
        shared = min([shared, *own])  # all that counts here is shown here
        seen.insert(place, tokens)
        for part in _authors(path, dict(enumerate(sample.turn_rewards)) if number == 0 else {}):
            if part.end > shared:
                yield part._replace(start=max(part.start, shared), path=number)


def _shared(tokens: bytes, other: bytes) -> int:
    """The number of tokens, of four bytes each, that both begin with."""
    count = min(len(tokens), len(other)) // 4
    mine, theirs = (np.frombuffer(each, "i4", count) for each in (tokens, other))
    differs = np.flatnonzero(mine != theirs)
    return int(differs[0]) if len(differs) else count


def _authors(sample: Sample | Branch, rewards: dict[int, float]) -> Iterator[_Stretch]:
    """The authors of a path's tokens. Without spans, neighbouring turns are one, and untrained ones unseen."""
    spans = sample.turn_spans
    length = sample.tokens.entries()
    if not spans:
        edges = np.flatnonzero(np.diff(sample.loss_mask.numpy() > 0, prepend=False, append=False)).tolist()
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        rewards = {}
    done = 0
    for number, (start, end) in enumerate([*spans, (length, length)]):
        if not done <= start <= end <= length:
            raise ValueError(f"turn {number} from token {start} to {end} does not fit {length} tokens")
        yield _Stretch("environment" if number else "prompt", done, start)
        yield _Stretch("policy", start, end, rewards.get(number))
        done = end


def _turns(
    sample: Sample, parts: list[_Stretch], keep: int, *, text: TokenText, training: Mapping[int, Training]
) -> Iterator[Turn]:
    """Only the first and the last tokens, `keep` together; a turn that is cut has its reward in the last part."""
    length = sum(part.end - part.start for part in parts)
    left, right = (keep // 2, length - keep + keep // 2) if keep < length else (0, 0)
    before = 0  # tokens of the parts before
    for part in parts:
        shift = part.start - before
        before += part.end - part.start
        for low, high in ((0, left), (right, length)):
            start, end = max(part.start, low + shift), min(part.end, high + shift)
            if start < end:
                cut = right - left if start == right + shift else 0
                shown = part._replace(start=start, end=end, reward=part.reward if end == part.end else None)
                yield _turn(sample.paths[part.path], shown, cut, text, training.get(part.path))


def _turn(path: Sample | Branch, part: _Stretch, cut_before: int, text: TokenText, training: Training | None) -> Turn:
    where = slice(part.start, part.end)
    tokens = path.tokens.numpy()[where].tolist()
    pieces = text.pieces(tokens)
    turn = Turn(
        author=part.author,
        text="".join(pieces),
        tokens=tokens,
        pieces=pieces,
        cut_before=cut_before,
        path=part.path,
        name=path.name,
    )
    if part.author != "policy":
        return turn
    versions = path.token_versions()[where]
    starts: list[int] = np.flatnonzero(np.diff(versions, prepend=-2)).tolist() if path.version_runs else []
    scored = bool((path.loss_mask.numpy()[where] > 0).any())  # the environment may have taken the turn out
    ratios = training.ratios if training is not None and training.trained[where].any() else None
    return msgspec.structs.replace(
        turn,
        logprobs=_rounded(path.behavior_logprobs.numpy()[where]) if scored else [],
        ratios=[] if ratios is None else _rounded(ratios[where]),
        trained=[0] * len(tokens) if training is None else training.trained[where].tolist(),
        version_runs=[(at, int(versions[at])) for at in starts],
        reward=part.reward,
    )


def _rounded(values: np.ndarray) -> list[float]:
    """As JSON numbers; [] when one is not finite."""
    return np.round(values.astype(np.float64), DIGITS).tolist() if np.isfinite(values).all() else []


class FailedTranscripts:
    """Makes those of groups whose samples all failed, on the node, which has the tokenizer."""

    def __init__(self, decode: Callable[[list[int]], str], node_id: str) -> None:
        """`decode`: a tokenizer's, special tokens included."""
        self._node_id = node_id
        self._text = TokenText(decode)
        self._logged = False

    def line(self, group: Group) -> bytes:
        """That of the group's longest sample, at most FAILED_BYTES; b'' when there is none. Raises nothing."""
        if not group.samples:
            return b""
        try:
            index, sample = max(enumerate(group.samples), key=lambda pair: pair[1].tokens.entries())
            facts = {"serial": group.serial, "sample": index, "node_id": self._node_id}
            facts |= {"why": ["failed"], "source": group.source}
            return transcript_line(sample, self._text, FAILED_BYTES, **facts)
        except Exception as error:
            if not self._logged:
                logger.warning("transcripts of failed groups are left out: %r", error)
            self._logged = True
            return b""
