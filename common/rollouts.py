"""The data that a rollout node sends to the learner: groups of samples, each token with its policy version.

Schema rules: structs are keyed, fields are only ever appended and new ones have defaults.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from common.wire_types import Array, Finite, Seconds, Tally, Version

SCHEMA_VERSION = 1


class Task(msgspec.Struct, frozen=True, gc=False):
    """One prompt to be rolled out `group_size` times."""

    serial: int  # position in the task stream, 0, 1, 2, ...
    problem: bytes  # JSON object of the dataset row; the environment is built from it
    seed: int  # sample i of the group uses `seed + i`
    group_size: int
    epoch: int = 0  # passes over the dataset that came before this task
    source: Annotated[str, Meta(max_length=256)] = ""  # its name in tasks.sources; '' in a job of one source


class VersionRun(msgspec.Struct, frozen=True, gc=False):
    """Tokens from index `start` (into the sample's tokens) up to the next run were sampled by `version`."""

    start: int
    version: int


class TemperatureRun(msgspec.Struct, frozen=True, gc=False):
    """Tokens from index `start` up to the next run were sampled at `temperature`."""

    start: int
    temperature: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Path(msgspec.Struct, frozen=True, gc=False):
    """One conversation of an episode, token by token."""

    tokens: Array  # [T] int32, prompt, sampled tokens and environment text in the order that the model saw
    loss_mask: Array  # [T] uint8, 1 where the policy sampled the token, 0 for prompt and environment text
    # [T] float32, log-probability under the distribution really sampled from (temperature and top-p included); 0 where
    # loss_mask is 0
    behavior_logprobs: Array
    version_runs: list[VersionRun]  # meaningful where loss_mask is 1

    def token_versions(self) -> np.ndarray:
        """[T] int64 policy version of every token; tokens before the first run get that run's version."""
        out = np.zeros(len(self.tokens.data) // 4, dtype=np.int64)
        for start, end, version in self.spans():
            out[start:end] = version
        return out

    def spans(self) -> list[tuple[int, int, int]]:
        """(start, end, version) of the tokens as in `token_versions`; [] without runs."""
        starts = [0, *(run.start for run in self.version_runs[1:]), len(self.tokens.data) // 4]
        return [(*span, run.version) for span, run in zip(pairwise(starts), self.version_runs, strict=False)]

    @property
    def sampled(self) -> int:
        """Tokens with loss_mask 1."""
        return int((self.loss_mask.numpy() > 0).sum())


class Branch(Path, frozen=True, gc=False):
    """A further path of an agent's turns. Tokens that an earlier path counts have loss_mask 0 here."""

    turn_spans: list[tuple[int, int]] = []  # this and the next fields: as in Sample
    routed_experts: Array | None = None
    name: str = ""
    teacher_logprobs: Array | None = None
    teacher_top_ids: Array | None = None
    teacher_top_logprobs: Array | None = None
    temperature_runs: list[TemperatureRun] = []


class Sample(Path, frozen=True, gc=False):
    """One episode, or of an agent's episode the longest of its conversations; the others are `branches`."""

    reward: float  # sum of the turn rewards
    # stop | length | turn_limit | environment_done, or of a failed sample environment_error | environment_timeout |
    # environment_flood | environment_killed | scorer_error | timeout | cancelled
    stop_reason: str
    turns: int = 1  # generate calls made
    turn_rewards: list[float] = []
    error: str | None = None  # why the sample failed; a failed sample trains nothing and enters no baseline
    metrics: dict[str, float] = {}  # the environment reports them; averaged over the step
    # [T x MoE layers x experts per token] int16, the experts that the engine chose for each input token. It is -1 for
    # tokens that were no input, such as the last one. None means not recorded.
    routed_experts: Array | None = None
    # [first token, token behind the last) of every generate call; [] from nodes of an earlier version
    turn_spans: list[tuple[int, int]] = []
    notes: dict[str, str] = {}  # short texts by name for the transcript, such as a judge's answer
    # [T] float32, the teacher's log-probabilities of the tokens; 0 where loss_mask is 0. None: the node has no teacher
    teacher_logprobs: Array | None = None
    # [N x k] of the N tokens with loss_mask 1: the teacher's most probable tokens in their places, int32, and their
    # log-probabilities, float32
    teacher_top_ids: Array | None = None
    teacher_top_logprobs: Array | None = None
    teacher_s: Seconds = 0.0  # from the question to the teacher to its answer, with all waits
    branches: list[Branch] = []  # they share the sample's reward and advantage
    name: str = ""  # the sub-agent's that had this conversation; '' for the agent itself
    # Temperatures that an agent asked for; tokens before the first run were sampled at rollout.temperature.
    temperature_runs: list[TemperatureRun] = []

    @property
    def paths(self) -> "list[Sample | Branch]":
        """The sample's own path and its branches; every sampled token has loss_mask 1 in at most one of them."""
        return [self, *self.branches]

    @property
    def sampled_all(self) -> int:
        """Tokens with loss_mask 1 over all paths."""
        return sum(path.sampled for path in self.paths)


class Group(msgspec.Struct, frozen=True, gc=False):
    """All samples of one task, as sent by the node that rolled it out."""

    serial: int
    samples: list[Sample]
    schema_version: int = SCHEMA_VERSION
    source: str = ""  # the task's


class GroupMeta(msgspec.Struct, frozen=True, gc=False):
    """Facts of a group that the broker and the ledger know without decoding it."""

    version_min: Version  # over the sampled tokens
    version_max: Version
    reward_mean: float  # over samples that did not fail
    sampled_tokens: Tally  # tokens with loss_mask 1
    failed_samples: Tally = 0
    generation_s: Finite = 0.0  # from the start of the group's first sample to the end of its last


encode_group: Callable[[Group], bytes] = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Group)


def decode_group(data: bytes | memoryview) -> Group:
    """MessagePack bytes to Group; raises ValueError when array lengths disagree or runs are not ordered."""
    group = _decoder.decode(data)
    if group.schema_version != SCHEMA_VERSION:
        raise ValueError(f"group schema {group.schema_version}, this learner reads {SCHEMA_VERSION}")
    for i, sample in enumerate(group.samples):
        for number, path in enumerate(sample.paths):
            if wrong := _wrong(path):
                where = f"branch {number}: " if number else ""
                raise ValueError(f"group {group.serial} sample {i}: {where}{wrong}")
    return group


def _wrong(sample: Sample | Branch) -> str:
    """The mismatch in a path, '' when there is none; looks at sizes and makes no arrays, for speed."""
    n = sample.tokens.entries()
    mask, logprobs = sample.loss_mask, sample.behavior_logprobs
    if mask.entries() != n:
        return f"loss_mask has {mask.entries()} entries for {n} tokens"
    if logprobs.entries() != n:
        return f"behavior_logprobs has {logprobs.entries()} entries for {n} tokens"
    end = n or 1
    if sample.routed_experts is not None and sample.routed_experts.entries() % end:
        return f"{sample.routed_experts.entries()} routed experts do not divide by {n} tokens"
    if sample.teacher_logprobs is not None and (wrong := _wrong_teacher(sample, n)):
        return wrong
    for before, after in pairwise(sample.temperature_runs):
        if before.start >= after.start:
            return f"temperature runs begin at {before.start} and then at {after.start}"
    if sample.temperature_runs and not 0 <= sample.temperature_runs[0].start <= sample.temperature_runs[-1].start < end:
        return f"temperature runs are not within {n} tokens"
    starts = [run.start for run in sample.version_runs]
    if any(before >= after for before, after in pairwise((-1, *starts, end))):
        return f"version runs {starts} are not increasing within {n} tokens"
    unversioned = starts[0] if starts else n
    if mask.dtype == "uint8":
        sampled = mask.data.count(0, 0, unversioned) != unversioned
    else:
        sampled = mask.numpy()[:unversioned].any()
    return "sampled tokens without a policy version" if sampled else ""


def _wrong_teacher(sample: Sample | Branch, n: int) -> str:
    """The mismatch in the teacher's columns of a sample of `n` tokens, '' when there is none."""
    assert sample.teacher_logprobs is not None
    if (found := sample.teacher_logprobs.entries()) != n:
        return f"teacher_logprobs has {found} entries for {n} tokens"
    ids, logprobs = (0 if x is None else x.entries() for x in (sample.teacher_top_ids, sample.teacher_top_logprobs))
    trained = sample.sampled
    if ids != logprobs or ids % (trained or ids + 1):
        return f"{ids} tokens of the teacher with {logprobs} log-probabilities for {trained} sampled tokens"
    return ""
