"""Transcripts of what the learner trains on: which samples are kept, and the thread that writes them.

choose (every rank, from the same groups) -> the forward pass keeps their log-probabilities -> the lead rank's queue
-> thread: text, JSON, RUN/transcripts. A full queue, a full disk or an odd token costs transcripts and nothing else.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from common.config.schema import Config
from common.process.run_dir import RunDir
from common.rollouts import Group, Sample
from common.segments import SEGMENTS, LineThread, SegmentWriter
from common.transcript_maker import TokenText, Training, transcript_line
from common.transcripts import Why
from learner.batch.batch import TrainingBatch
from learner.batch.dynamic_sampling import carries_signal
from learner.batch.packing import Document
from learner.loop.recording_loss import Logprobs

LONGEST_BYTES = 1 << 20  # a longer transcript is cut
WORST_LOG_RATIO = 20.0  # beyond, ratios are cut, so that they stay numbers in JSON

Chosen = dict[tuple[int, int], list[Why]]  # (serial, sample) to the reasons


def choose(groups: Sequence[Group], share: float | Literal["none"], seed: int) -> Chosen:
    """The samples whose transcripts are kept, always the same ones: a share, the best, the worst and the longest.

    A sample that failed is worse than any other.
    """
    played = [((g.serial, i), s) for g in sorted(groups, key=lambda g: g.serial) for i, s in enumerate(g.samples)]
    if share == "none" or not played:
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


class Item(NamedTuple):
    """A chosen sample of a step."""

    sample: Sample
    facts: dict[str, Any]  # see transcript_line
    document: Document | None  # None: it trained nothing
    logprobs: np.ndarray | None


def items(
    batch: TrainingBatch, groups: Sequence[Group], nodes: Mapping[int, str], chosen: Chosen, logprobs: Logprobs
) -> Iterator[Item]:
    """The chosen samples of a step's groups; `nodes`: who sampled each group, by serial."""
    documents = {document.origin: document for document in batch.documents}
    by_serial = {group.serial: group for group in groups}
    filters = batch.statistics.groups_filtered > 0
    for where, why in chosen.items():
        serial, index = where
        group = by_serial[serial]
        step = None if filters and not carries_signal(group) else batch.step
        facts = {"serial": serial, "sample": index, "node_id": nodes.get(serial, ""), "why": why, "step": step}
        yield Item(group.samples[index], facts, documents.get(where), logprobs.get(where))


def transcript_thread(config: Config) -> LineThread[Item]:
    """The thread that writes RUN/transcripts/steps-*, for the lead rank. Its start loads model.path's tokenizer."""
    limit = config.telemetry.transcripts_mib << 20
    limit_bytes = min(LONGEST_BYTES, limit // SEGMENTS)

    def build() -> Callable[[Item], bytes]:
        from transformers import AutoTokenizer  # only the lead rank needs it

        tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text = TokenText(lambda ids: tokenizer.decode(ids, **options))
        text.pieces([0])  # transformers imports some modules only now
        return lambda item: transcript_line(item.sample, text, limit_bytes, _training(item), **item.facts)

    writer = SegmentWriter(RunDir.of(config).transcripts, "steps", limit * 3 // 4)  # the rest is for failed groups
    return LineThread("transcripts", writer, build)


def _training(item: Item) -> Training | None:
    document, ratios = item.document, None
    if document is None:
        return None
    if item.logprobs is not None and document.behavior_logprobs is not None:
        drift = np.insert(item.logprobs - document.behavior_logprobs[1:], 0, 0.0)  # [L]; nothing predicts the first
        ratios = np.exp(np.clip(drift, -WORST_LOG_RATIO, WORST_LOG_RATIO))
    return Training(document.loss_mask, document.advantage, ratios)
