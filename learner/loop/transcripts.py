"""Transcripts of what the learner trains on: which samples are kept, and the thread that writes them.

choose (every rank, from the same groups) -> the forward pass keeps their log-probabilities -> the lead rank's queue
-> thread: text, JSON, RUN/transcripts. A full queue, a full disk or an odd token costs transcripts and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from common.config.schema import Config
from common.line_thread import LineThread
from common.process.run_dir import RunDir
from common.rollouts import Group, Sample
from common.segments import SEGMENTS, SegmentWriter
from common.transcript_maker import TokenText, Training, transcript_line
from common.transcripts import Why
from learner.batch.batch import TrainingBatch
from learner.batch.dynamic_sampling import carries_signal
from learner.batch.packing import Document
from learner.loop.recording_loss import Logprobs

LONGEST_BYTES = 1 << 20  # a longer transcript is cut
WORST_LOG_RATIO = 20.0  # beyond, ratios are cut, so that they stay numbers in JSON

Chosen = dict[tuple[int, int], list[Why]]  # (serial, sample) to the reasons


def choose(groups: Sequence[Group], share: float | Literal["off"], seed: int) -> Chosen:
    """The samples whose transcripts are kept, always the same ones: a share, the best, the worst and the longest.

    A sample that failed is worse than any other.
    """
    played = [((g.serial, i), s) for g in sorted(groups, key=lambda g: g.serial) for i, s in enumerate(g.samples)]
    if share == "off" or not played:
        return {}
    chosen: Chosen = {where: ["share"] for where, _ in played if _draw(seed, *where) < share}

    def add(why: Why, found: tuple[tuple[int, int], Sample]) -> None:
        chosen.setdefault(found[0], []).append(why)

    good = [pair for pair in played if pair[1].error is None]
    failed = [pair for pair in played if pair[1].error is not None]
    if good:
        add("best", max(good, key=lambda pair: pair[1].reward))
    add("worst", max(failed, key=_length) if failed else min(good, key=lambda pair: pair[1].reward))
    add("longest", max(played, key=_length))
    for where, _ in failed:
        if where in chosen:
            chosen[where].append("failed")
    return chosen


def _draw(seed: int, serial: int, sample: int) -> float:
    """Uniform in [0, 1)."""
    return xxhash.xxh3_64_intdigest(f"{seed} {serial} {sample}".encode()) / 2**64


def _length(pair: tuple[tuple[int, int], Sample]) -> int:
    return pair[1].tokens.entries()


@dataclass(frozen=True)
class _Item:
    where: tuple[int, int]
    sample: Sample
    node_id: str
    why: list[Why]
    step: int | None
    document: Document | None  # None: it trained nothing
    logprobs: np.ndarray | None


class StepTranscripts:
    """Writes RUN/transcripts/steps-*; only the lead rank has one."""

    def __init__(self, config: Config) -> None:
        """The tokenizer of model.path is loaded in the thread."""
        limit = config.telemetry.transcripts_mib << 20
        self._limit_bytes = min(LONGEST_BYTES, limit // SEGMENTS)
        self._on, self._model = config.telemetry.transcripts != "off", config.model.path
        writer = SegmentWriter(RunDir.of(config).transcripts, "steps", limit * 3 // 4)  # the rest is for failed groups
        self._thread: LineThread[_Item] = LineThread("transcripts", writer, self._maker)

    @property
    def dropped(self) -> int:
        return self._thread.dropped

    def start(self) -> None:
        """Load the tokenizer before the first step needs it."""
        if self._on:
            self._thread.start()

    def put(
        self,
        batch: TrainingBatch,
        groups: Sequence[Group],
        nodes: Mapping[int, str],
        chosen: Chosen,
        logprobs: Logprobs,
    ) -> None:
        """Hand over what is chosen of a step; `nodes`: who sampled each group, by serial."""
        documents = {d.origin: d for d in batch.documents if d.origin in chosen}
        by_serial = {group.serial: group for group in groups}
        filters = batch.statistics.groups_filtered > 0
        for where, why in chosen.items():
            group = by_serial[where[0]]
            step = None if filters and not carries_signal(group) else batch.step
            trained = documents.get(where), logprobs.get(where)
            self._thread.put(_Item(where, group.samples[where[1]], nodes.get(where[0], ""), why, step, *trained))

    def close(self) -> None:
        self._thread.close()

    def _maker(self) -> Callable[[_Item], bytes]:
        from transformers import AutoTokenizer  # takes a second, which the thread has

        tokenizer = AutoTokenizer.from_pretrained(self._model, local_files_only=True)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text = TokenText(lambda ids: tokenizer.decode(ids, **options))
        return lambda item: self._line(item, text)

    def _line(self, item: _Item, text: TokenText) -> bytes:
        serial, sample = item.where
        training = _training(item.document, item.logprobs) if item.document is not None else None
        facts = {"serial": serial, "sample": sample, "node_id": item.node_id, "why": item.why, "step": item.step}
        return transcript_line(item.sample, text, self._limit_bytes, training, **facts)


def _training(document: Document, logprobs: np.ndarray | None) -> Training:
    ratios = None
    if logprobs is not None and document.behavior_logprobs is not None:
        drift = logprobs - document.behavior_logprobs[1:]
        ratios = np.exp(np.clip(np.insert(drift, 0, 0.0), -WORST_LOG_RATIO, WORST_LOG_RATIO))  # [L]; the first: 1
    return Training(document.loss_mask, document.advantage, ratios)
