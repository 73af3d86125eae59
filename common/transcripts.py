"""A transcript: one episode as people read it. RUN/transcripts has one JSON line for each; docs/transcripts.md."""

from typing import Literal

import msgspec

FAILED_BYTES = 256 << 10  # Limit of a transcript that a node sends with a group that failed.
SentTranscript = tuple[int, str, bytes]  # serial, node id, and JSON of a Transcript that the node made
Why = Literal["share", "best", "worst", "longest", "failed"]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of tokens by one author. The lists have one entry per token, or none at all."""

    author: Literal["prompt", "policy", "environment"]
    text: str
    tokens: list[int]
    pieces: list[str]  # the text of each token; a character of several tokens is in the last
    logprobs: list[float] = []  # behavior_logprobs; only in a policy's turn, as are the lists below
    ratios: list[
        float
    ] = []  # likewise: exp(logprobs - behavior_logprobs) at the step that trained it, before its update
    trained: list[int] = []  # 1 where the token was in the loss
    version_runs: list[tuple[int, int]] = []  # (index in this turn, policy version from there on)
    reward: float | None = None  # the environment gave it for a policy's turn
    cut_before: int = 0  # tokens left out just before this turn, which may be the second part of one


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One episode."""

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
    advantage: float | None = None
    metrics: dict[str, float] = {}  # the environment reports them
    sampled_tokens: int = 0
    cut_tokens: int = 0  # left out in the middle, because the transcript was too long
