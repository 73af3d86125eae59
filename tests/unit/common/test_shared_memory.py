"""Staging memory that another process of the machine reads."""

import gc
from multiprocessing.connection import Connection

import pytest
import torch

from common.weights.shared_memory import SharedBuffers, attach
from tests import forked
from tests.waiting import LIMIT_S

SIZE = 4096 + 7


def double(pipe: Connection) -> None:
    """Map what is told, say its sum, and write into it."""
    flat = attach(pipe.recv_bytes().decode(), SIZE)
    pipe.send_bytes(str(int(flat.sum())).encode())
    flat[0] = 9
    pipe.send_bytes(b"written")


def test_another_process_maps_the_same_memory() -> None:
    buffers = SharedBuffers()
    flat = buffers.allocate(SIZE)
    assert flat.shape == (SIZE,) and not flat.any()
    flat[5] = 7
    ours, theirs = forked.context().Pipe()
    child = forked.start(double, theirs)
    ours.send_bytes(buffers.path(flat).encode())
    assert ours.recv_bytes() == b"7"
    assert ours.recv_bytes() == b"written" and int(flat[0]) == 9
    child.join(LIMIT_S)


def test_a_buffer_that_is_gone_cannot_be_mapped_and_holds_no_descriptor() -> None:
    buffers = SharedBuffers()
    flat = buffers.allocate(SIZE)
    path = buffers.path(flat)
    assert torch.equal(attach(path, SIZE), flat)
    del flat
    gc.collect()
    with pytest.raises(RuntimeError):
        attach(path, SIZE)
