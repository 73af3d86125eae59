"""Transcripts of what the learner trains on: which samples are kept, their log-probabilities, and who writes them.

choose (every rank, from the same groups) -> the forward pass keeps their log-probabilities -> the lead rank's queue
-> thread: text, JSON, RUN/transcripts. A full queue, a full disk or an odd token costs transcripts and nothing else.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from common.config.schema import Config
from common.hub import load_tokenizer
from common.process.run_dir import RunDir
from common.rollouts import Group, Sample
from common.segments import SEGMENTS, LineThread, SegmentWriter
from common.transcripts import TokenText, Training, Why, transcript_line
from learner.backend_protocol import Backend, LossFunction, LossOutput, Microbatch
from learner.batch.batch import TrainingBatch
from learner.batch.packing import Document

LONGEST_BYTES = 1 << 20  # a longer transcript is cut
MOST_PLACES = 1 << 20  # Log-probabilities that one step collects: 4 MiB.
WORST_LOG_RATIO = 20.0  # beyond, ratios are cut, so that they stay numbers in JSON

Place = tuple[int, int]  # (serial, sample)
Chosen = dict[Place, list[Why]]
Logprobs = dict[tuple[int, int, int], np.ndarray]  # [L - 1] float32 by serial, sample and path


def choose(groups: Sequence[Group], share: float | Literal["none"], seed: int) -> Chosen:
    """The samples whose transcripts are kept, always the same ones: a share, the best, the worst and the longest.

    A sample that failed is worse than any other.
    """
    samples = {(g.serial, i): s for g in sorted(groups, key=lambda g: g.serial) for i, s in enumerate(g.samples)}
    if share == "none" or not samples:
        return {}
    chosen: Chosen = {
        where: ["share"]
        for where in samples  # a draw in [0, 1)
        if xxhash.xxh3_64_intdigest(f"{seed} {where[0]} {where[1]}".encode()) / 2**64 < share
    }

    tokens = {where: sum(path.tokens.entries() for path in sample.paths) for where, sample in samples.items()}
    rewards = {where: sample.reward for where, sample in samples.items() if sample.error is None}
    failed = tokens.keys() - rewards.keys()
    picked: list[tuple[Why, Place]] = [("best", max(rewards, key=rewards.__getitem__))] if rewards else []
    worst = max(sorted(failed), key=tokens.__getitem__) if failed else min(rewards, key=rewards.__getitem__)
    picked.append(("worst", worst))
    picked.append(("longest", max(tokens, key=tokens.__getitem__)))
    for why, where in picked:
        chosen.setdefault(where, []).append(why)
    for where in chosen.keys() & failed:
        chosen[where].append("failed")
    return chosen


class Recorded(NamedTuple):
    """A document whose log-probabilities are kept."""

    serial: int
    sample: int
    path: int
    places: int


class RecordingLoss:
    """A LossFunction that also keeps log-probabilities, as they were before the step's first update: no second pass.

    It sees whole documents on the last pipeline stage, under every layout. Several ranks may see the same document and
    none of them all. An elementwise maximum over the ranks, from minus infinity, brings all of them together.
    """

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self.wanted: dict[int, Recorded] = {}  # by number of the document; the same on every rank
        self._found: dict[int, Tensor] = {}

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
        begin = logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
        for number, part in zip(batch.numbers, begin.split(batch.document_lengths), strict=False):
            if number in self.wanted and number not in self._found:
                self._found[number] = part.clone()  # else the whole microbatch would stay in memory
        return self._loss(logprobs, entropy, batch)

    def watch(self, documents: Sequence[Document], chosen: Container[Place]) -> None:
        """Begin a step on these documents. Those with a `chosen` origin are kept while there is room."""
        self.expect({})
        room = MOST_PLACES
        for number, document in enumerate(documents):
            if document.origin in chosen and document.places <= room:
                room -= document.places
                self.wanted[number] = Recorded(*document.origin, document.path, document.places)

    def expect(self, wanted: dict[int, Recorded]) -> None:
        """Begin a step as the lead rank did."""
        self.wanted = wanted
        self._found = {}

    def collect(self, backend: Backend) -> Logprobs:
        """The log-probabilities of the chosen documents. Collective, unless nothing was chosen."""
        wanted = self.wanted
        found = self._found
        self.expect({})
        if not wanted:
            return {}
        parts = [found.get(n, torch.full((d.places,), -torch.inf)).float().cpu() for n, d in wanted.items()]
        largest = backend.largest(torch.cat(parts)).split([len(part) for part in parts])
        pairs = zip(wanted.values(), largest, strict=True)
        return {d[:3]: part.numpy() for d, part in pairs if bool(part.isfinite().all())}


class Item(NamedTuple):
    sample: Sample
    training: dict[int, Training]  # by path; those that trained nothing are left out
    facts: dict[str, Any]  # see transcript_line


def items(
    batch: TrainingBatch, groups: Sequence[Group], nodes: Mapping[int, str], chosen: Chosen, logprobs: Logprobs
) -> Iterator[Item]:
    """The chosen samples of a step's groups; `nodes`: who sampled each group, by serial."""
    documents = dict[Place, list[Document]]()
    for document in batch.documents:
        documents.setdefault(document.origin, []).append(document)
    by_serial = {group.serial: group for group in groups}
    for where, why in chosen.items():
        serial, index = where
        group = by_serial[serial]
        training = {d.path: _training(d, logprobs.get((*where, d.path))) for d in documents.get(where, ())}
        step = None if serial in batch.filtered else batch.step
        facts = {"serial": serial, "sample": index, "node_id": nodes.get(serial, ""), "why": why, "step": step}
        facts["source"] = group.source
        yield Item(group.samples[index], training, facts)


def _training(document: Document, logprobs: np.ndarray | None) -> Training:
    ratios = None
    if logprobs is not None and document.behavior_logprobs is not None:
        drift = np.insert(logprobs - document.behavior_logprobs[1:], 0, 0.0)  # [L]; nothing predicts the first
        drift[document.loss_mask == 0] = 0.0  # where the learner computes nothing
        ratios = np.exp(np.clip(drift, -WORST_LOG_RATIO, WORST_LOG_RATIO))
    own = document.advantage if document.rewards is None else None  # from a critic every token has its own
    return Training(document.loss_mask, own, ratios)


def transcript_thread(config: Config) -> LineThread[Item]:
    """The thread that writes RUN/transcripts/steps-*, for the lead rank. Its start loads model.path's tokenizer."""
    limit = config.telemetry.transcripts_mib << 20
    limit_bytes = min(LONGEST_BYTES, limit // SEGMENTS)

    def build() -> Callable[[Item], bytes]:
        tokenizer = load_tokenizer(config.model.path)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text = TokenText(lambda ids: tokenizer.decode(ids, **options))
        text.pieces([0])  # transformers imports some modules only now
        return lambda item: transcript_line(item.sample, text, limit_bytes, item.training, **item.facts)

    writer = SegmentWriter(RunDir.of(config).transcripts, "steps", limit * 3 // 4)  # the rest is for failed groups
    return LineThread("transcripts", writer, build)
