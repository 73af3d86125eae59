"""The tokens of an episode while it runs, and the sample that they become."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.config.tasks import PENALTY
from common.rollouts import Branch, Sample, TemperatureRun, VersionRun
from common.wire_types import Array
from rollout_fleet.environments.protocol import StopReason
from rollout_fleet.environments.reward_library import total_of
from rollout_fleet.episode.sampler_protocol import Generation, Session


@dataclass
class TokenRecord:
    """`tokens`, `mask` and `logprobs` stay equally long. They only grow, except in `retract`."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    turns: int = 0
    sampled: int = 0
    routed: list[np.ndarray] = field(default_factory=list)  # together: of the first `routed_tokens` tokens
    routed_tokens: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)  # where each turn is in `tokens`
    name: str = ""  # the sub-agent's
    temperatures: list[TemperatureRun] = field(default_factory=list)  # empty: all at the job's
    branches: "list[TokenRecord]" = field(default_factory=list)  # other conversations of the episode
    session: Session = field(default_factory=Session)  # shared with the paths that branch off

    def observe(self, ids: list[int]) -> None:
        """Append tokens that the policy reads."""
        self.tokens += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def retract(self, count: int) -> None:
        """Drop the last `count` observed tokens, which no model call has seen."""
        for column in (self.tokens, self.mask, self.logprobs):
            del column[len(column) - count :]

    def extend(self, generation: Generation) -> None:
        """Append the policy's tokens as they were sampled."""
        offset = len(self.tokens)
        count = len(generation.tokens)
        for run in generation.version_runs:
            if not self.runs or self.runs[-1].version != run.version:
                self.runs.append(VersionRun(offset + run.start, run.version))
        self.tokens += generation.tokens
        self.mask += [1] * count
        self.logprobs += generation.logprobs
        self.spans.append((offset, offset + count))
        self.sampled += count
        self.turns += 1
        if generation.routed_experts is not None:
            # an earlier turn's experts stay, because its tokens were sampled with them
            self.routed.append(generation.routed_experts[self.routed_tokens :])
            self.routed_tokens = max(self.routed_tokens, len(generation.routed_experts))

    def prefix(self, length: int, turns: int, sampled: int) -> "TokenRecord":
        """A copy of the first `length` tokens, which end with turn `turns`, `sampled` tokens sampled so far."""
        routed = [np.concatenate(self.routed)[: length - 1]] if self.routed else []
        return TokenRecord(
            tokens=self.tokens[:length],
            mask=self.mask[:length],
            logprobs=self.logprobs[:length],
            runs=[run for run in self.runs if run.start < length],
            turns=turns,
            sampled=sampled,
            routed=routed,
            routed_tokens=len(routed[0]) if routed else 0,
            spans=self.spans[:turns],
            name=self.name,
            temperatures=[run for run in self.temperatures if run.start < length],
            session=self.session,
        )

    def sampled_at(self, temperature: float, job: float) -> None:
        """The last turn was sampled at `temperature`; turns before the first run are at the job's."""
        before = self.temperatures[-1].temperature if self.temperatures else job
        if temperature != before:
            self.temperatures.append(TemperatureRun(self.spans[-1][0], temperature))

    def untrain(self, start: int, end: int) -> None:
        """Take the tokens from `start` up to `end` out of the loss."""
        self.mask[start:end] = [0] * (end - start)
        self.logprobs[start:end] = [0.0] * (end - start)

    def penalize(self, penalty: float) -> None:
        """Add DAPO's overlong penalty, at most 0, to the reward; it is a metric as well."""
        self.turn_rewards = [*self.turn_rewards[:-1], sum(self.turn_rewards[-1:]) + penalty]
        self.metrics = {**self.metrics, PENALTY: penalty}

    def sample(self, reason: StopReason, error: str | None = None) -> Sample:
        """The sample for the learner; `error` says why the episode failed."""
        return Sample(
            **self._path(),
            reward=total_of(self.turn_rewards),
            stop_reason=reason.value,
            turns=self.turns,
            turn_rewards=self.turn_rewards,
            error=error,
            metrics=self.metrics,
            notes=self.notes,
            branches=[Branch(**branch._path()) for branch in self.branches],
        )

    def _path(self) -> dict[str, Any]:
        """The fields that a sample and a branch have in common."""
        return dict(
            tokens=Array.of(self.tokens, "int32"),
            loss_mask=Array.of(self.mask, "uint8"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            version_runs=self.runs,
            turn_spans=self.spans,
            routed_experts=self._routing(),
            name=self.name,
            temperature_runs=self.temperatures,
        )

    def _routing(self) -> Array | None:
        """[T, MoE layers, experts per token], -1 for tokens that were never fed."""
        if not self.routed:
            return None
        known = np.concatenate(self.routed)[: len(self.tokens)]
        unknown = np.full((len(self.tokens) - len(known), *known.shape[1:]), -1, dtype=np.int16)
        return Array.of(np.concatenate([known, unknown]), "int16")
