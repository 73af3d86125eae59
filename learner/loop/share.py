"""Each rank's part of a step, as the lead rank sends it: the documents of its replica, and facts for all ranks.

    8 bytes: length of the head | head (MessagePack) | arrays of the documents, each at a multiple of 8

A document is sent once, whatever the number of the updates that train on it.

Ranks that need the same bytes form a cell: those of one replica. With routing replay a cell is one pipeline stage of a
replica, and gets the routing of its own layers. A document's home is the first rank of its replica.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from learner.backend_protocol import Backend
from learner.batch.batch import BatchStatistics
from learner.batch.packing import Document
from learner.batch.updates import Part
from learner.loop.transcripts import Recorded

ALIGNED = 8


class Cell(msgspec.Struct, frozen=True):
    replica: int  # data-parallel rank
    layers: tuple[int, ...]  # with experts, whose routing the ranks replay
    ranks: tuple[int, ...] = ()  # ascending


class Told(msgspec.Struct, frozen=True):
    """Facts of a step for every rank."""

    statistics: BatchStatistics = BatchStatistics()
    recorded: dict[int, Recorded] = {}  # documents whose log-probabilities transcripts ask for, by number
    canary: list[int] = []
    refused: str = ""  # why the lead rank cannot pack the step: every rank raises UsageError


class _Head(msgspec.Struct):
    told: Told
    parts: list[Part]
    documents: dict[int, dict[str, Any]]  # by number: fields that are no arrays
    arrays: list[tuple[int, str, str, list[int]]]  # number, field, dtype and shape


_decode_head = msgspec.msgpack.Decoder(_Head).decode


def cells(backend: Backend) -> list[Cell]:
    """Every cell, in order of its first rank. Collective."""
    own = msgspec.msgpack.encode(Cell(backend.data_parallel_rank, backend.routing_layers))
    found = dict[tuple[int, tuple[int, ...]], list[int]]()
    for rank, data in enumerate(backend.all_gather_bytes(own)):
        cell = msgspec.msgpack.decode(data, type=Cell)
        found.setdefault((cell.replica, cell.layers), []).append(rank)
    return [Cell(*key, ranks=tuple(ranks)) for key, ranks in found.items()]


def encode(told: Told, documents: Mapping[int, Document], parts: Sequence[Part]) -> np.ndarray:
    """[n] uint8; `documents` are those of `parts`, by number."""
    head = _Head(told, list(parts), {}, [])
    arrays: list[np.ndarray] = []
    for number, document in documents.items():
        head.documents[number] = {}
        for name, value in vars(document).items():
            if isinstance(value, np.ndarray):
                head.arrays.append((number, name, value.dtype.str, list(value.shape)))
                arrays.append(value)
            elif value is not None:
                head.documents[number][name] = value
    begin = msgspec.msgpack.encode(head)
    size = _up(ALIGNED + len(begin))
    data = np.empty(size + sum(_up(array.nbytes) for array in arrays), dtype=np.uint8)
    data[:ALIGNED] = np.frombuffer(struct.pack("<q", len(begin)), np.uint8)
    data[ALIGNED : ALIGNED + len(begin)] = np.frombuffer(begin, np.uint8)
    data[ALIGNED + len(begin) : size] = 0
    for array in arrays:
        data[size : size + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        data[size + array.nbytes : (size := size + _up(array.nbytes))] = 0
    return data


def decode(data: np.ndarray) -> tuple[Told, dict[int, Document], list[Part]]:
    """The arguments of `encode`; arrays are views of `data`."""
    at = _up(ALIGNED + (length := struct.unpack("<q", data[:ALIGNED].tobytes())[0]))
    head = _decode_head(data[ALIGNED : ALIGNED + length].tobytes())
    fields: dict[int, dict[str, Any]] = head.documents
    for number, name, dtype, shape in head.arrays:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        fields[number][name] = data[at : at + size].view(dtype).reshape(shape)
        at += _up(size)
    return head.told, {number: Document(**own) for number, own in fields.items()}, head.parts


def of_layers(document: Document, layers: tuple[int, ...]) -> Document:
    """The document with the routing of these layers only."""
    routing = document.routed_experts
    if routing is None or routing.shape[1] == len(layers):
        return document
    first, end = min(layers, default=0), max(layers, default=-1) + 1
    own = routing[:, first:end]  # a view, unless layers are missing in between
    return replace(document, routed_experts=own if end - first == len(layers) else routing[:, layers])


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
