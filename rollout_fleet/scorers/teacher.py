"""A node's teacher: asked about every sample of a training when its episode has ended; docs/distillation.md."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Self

import msgspec
import numpy as np

from common.config.loss_keys import DistillationConfig
from common.config.schema import Config
from common.rollouts import Sample
from common.wire_types import Array
from rollout_fleet.episode.driver import checked_notes
from rollout_fleet.scorers.client import Scorer
from rollout_fleet.scorers.requests import ScorerFailed
from rollout_fleet.scorers.teacher_requests import TOKEN_BYTES, Taught, question, taught, vocabulary_of

logger = logging.getLogger(__name__)


class Teacher:
    """Belongs to one event loop, as its client does."""

    def __init__(self, name: str, scorer: Scorer, *, top_k: int, vocabulary: int) -> None:
        """`vocabulary`: the policy's tokens; `top_k`: the teacher's tokens in each place."""
        self._name = name
        self._scorer = scorer
        self._top_k = top_k
        self._vocabulary = vocabulary
        self.close = scorer.close

    @classmethod
    def of(cls, config: Config, told: DistillationConfig) -> Self:
        scorer = Scorer(told.teacher, config.scorers[told.teacher])
        return cls(told.teacher, scorer, top_k=told.wanted, vocabulary=vocabulary_of(config.model.path))

    @property
    def paused(self) -> str:
        """Why the node takes no more tasks; '' when all is well."""
        return self._scorer.paused

    async def ask(self, tokens: Sequence[int]) -> Taught:
        """The teacher's log-probabilities of T tokens. Raises ScorerFailed."""
        read = partial(taught, tokens=tokens, top_k=self._top_k, vocabulary=self._vocabulary)
        body = question(self._scorer.config, tokens, self._top_k)
        return await self._scorer.ask(body, read, room=len(tokens) * (self._top_k + 1) * TOKEN_BYTES)

    async def teach(self, sample: Sample) -> Sample:
        """The sample with the teacher's columns, or failed with the reason why it has none."""
        if sample.error is not None:
            return sample
        columns: list[dict[str, Array | None]] = []
        said = ""
        seconds = 0.0
        try:
            for path in sample.paths:
                columns.append({})
                if path.sampled:
                    found = await self.ask(path.tokens.numpy().tolist())
                    columns[-1] = self._columns(path.loss_mask.numpy() > 0, found)
                    said = said or found.said
                    seconds += found.seconds
        except ScorerFailed as failed:
            logger.warning("%s: %s", failed.reason.value, failed)
            return msgspec.structs.replace(sample, stop_reason=failed.reason.value, error=str(failed))
        replace = msgspec.structs.replace
        branches = [replace(b, **own) for b, own in zip(sample.branches, columns[1:], strict=True)]
        notes = sample.notes | (checked_notes({self._name: said}) if said else {})
        return replace(sample, branches=branches, teacher_s=seconds, notes=notes, **columns[0])

    def _columns(self, sampled: np.ndarray, found: Taught) -> dict[str, Array | None]:
        """The columns of a path of T tokens; `sampled`: [T] bool."""
        columns: dict[str, Array | None] = {
            "teacher_logprobs": Array.of(np.where(sampled, found.logprobs, 0), "float32")
        }
        if self._top_k:
            columns["teacher_top_ids"] = Array.of(found.top_ids[sampled].ravel(), "int32")
            columns["teacher_top_logprobs"] = Array.of(found.top_logprobs[sampled].ravel(), "float32")
        return columns
