"""Writes of a segment on disks that refuse direct writes, take a part of them, or are full; and the history's file."""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.journal.file_store import FileStore, StoreInfo
from broker.journal.segments import BLOCK, STAGE_BYTES, SegmentFile, read_frame
from broker.journal.store import Compaction, Location, StoreUnavailable

Pwrite = Callable[[int, memoryview, int], int]


@pytest.fixture
def stage() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, STAGE_BYTES)
    made[:] = b"\xff" * STAGE_BYTES  # as after earlier writes
    yield made


@pytest.fixture
def file(tmp_path: Path, stage: mmap.mmap) -> Iterator[SegmentFile]:
    made = SegmentFile(tmp_path / "segment", stage)
    yield made
    made.close()


def on_disk(file: SegmentFile) -> bytes:
    return file.path.read_bytes()


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def test_every_write_begins_a_block_and_is_filled_up_with_zeros(file: SegmentFile) -> None:
    file.write([b"one", memoryview(b" and two"), b""])
    assert (file.size, on_disk(file)) == (BLOCK, block(b"one and two"))
    file.write([b"x" * BLOCK])
    file.write([])
    assert (file.size, on_disk(file)) == (2 * BLOCK, block(b"one and two") + b"x" * BLOCK)
    file.sync()
    assert file.path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("more", [-1, 0, 1, BLOCK])
def test_a_write_may_be_larger_than_the_buffer(file: SegmentFile, more: int) -> None:
    parts = [b"a" * 1000, b"b" * (STAGE_BYTES + more), b"c" * 3000]
    file.write(parts)
    assert on_disk(file) == block(b"".join(parts))
    assert file.size == len(on_disk(file))
    file.write([b"behind"])
    assert on_disk(file)[-BLOCK:] == block(b"behind")


def test_a_write_that_is_repeated_takes_the_place_of_the_first(file: SegmentFile) -> None:
    file.write([b"first"])
    begun = file.size
    file.write([b"second", b"x" * BLOCK])
    file.size = begun
    file.write([b"again"])
    assert file.size == begun + BLOCK
    assert on_disk(file)[:-BLOCK] == block(b"first") + block(b"again"), "what was behind it stays"
    file.size = begun
    file.write([b"third"])
    assert on_disk(file)[begun : begun + BLOCK] == block(b"third")


@pytest.mark.parametrize("written", [0, 1, 100, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_disk_that_takes_a_part_gets_the_rest(
    file: SegmentFile, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    real, parts = os.pwrite, [written]

    def partly(handle: int, data: memoryview, offset: int) -> int:
        count = parts.pop() if parts else len(data)
        return real(handle, bytes(data[:count]), offset) if count else 0

    file._direct, handle = False, os.open(file.path, os.O_RDWR)  # bytes of any length, as through the page cache
    os.dup2(handle, file._handle)
    os.close(handle)
    monkeypatch.setattr(os, "pwrite", partly)
    data = bytes(range(256)) * (3 * BLOCK // 256)
    file.write([data])
    assert on_disk(file) == data


@pytest.mark.parametrize("refused", [errno.EINVAL, None], ids=["refused", "cut to no whole block"])
def test_where_direct_writes_do_not_work_the_page_cache_takes_them(
    file: SegmentFile, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    real, calls, first = os.pwrite, list[bool](), [True]
    file._direct = True

    def indirect(handle: int, data: memoryview, offset: int) -> int:
        calls.append(file._direct)
        if first:
            first.clear()
            if refused is not None:
                raise OSError(refused, "not here")
            buffered = os.open(file.path, os.O_RDWR)
            try:
                return real(buffered, bytes(data[:100]), offset)
            finally:
                os.close(buffered)
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", indirect)
    file.write([b"y" * 2 * BLOCK])
    file.write([b"z"])
    assert calls == [True, False, False]
    assert on_disk(file) == b"y" * 2 * BLOCK + block(b"z")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSPC, errno.EIO])
def test_another_error_is_raised_and_the_file_is_as_it_was(
    file: SegmentFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file.write([b"before"])
    before, real, left = on_disk(file), os.pwrite, [1]

    def fails(handle: int, data: memoryview, offset: int) -> int:
        if left:
            left.pop()
            return real(handle, data, offset)
        raise OSError(number, os.strerror(number))

    file._direct = False
    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError) as error:
        file.write([b"x" * (STAGE_BYTES + 1)])
    assert error.value.errno == number
    assert (file.size, on_disk(file)) == (BLOCK, before)
    monkeypatch.setattr(os, "pwrite", real)
    file.write([b"behind"])
    assert on_disk(file) == before + block(b"behind")


# ---------------------------------------------------------------- the history


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    made = FileStore(tmp_path, StoreInfo("id", "run", 0.0, 7))
    yield made
    made.close()


def test_a_record_of_the_history_takes_the_place_of_what_lies_behind_the_known_part(store: FileStore) -> None:
    first = store._append_history(0, b"one")
    store._append_history(first, b"never counted, because the log was not replaced")
    second = store._append_history(first, b"two")
    assert list(store.history(second)) == [b"one", b"two"]
    assert list(store.history(first)) == [b"one"] and list(store.history(0)) == []
    path = store.path / "history.log"
    data = path.read_bytes()
    assert len(data) == second
    frame = read_frame(data, 0, 7)
    assert frame is not None
    assert (frame.seq, frame.synced, frame.end, frame.payload_bytes) == (0, 0, first, 0)
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_the_history_is_synced_before_its_size_counts(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(os.fstat(handle).st_size))
    assert synced == [] and [store._append_history(0, b"one")] == synced


def test_a_disk_that_takes_the_history_in_parts_gets_all_of_it(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: real(handle, data[:7], offset))
    size = store._append_history(store._append_history(0, b"one"), b"two, which is longer")
    assert list(store.history(size)) == [b"one", b"two, which is longer"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_may_be_tried_again(store: FileStore, number: int) -> None:
    with pytest.raises(StoreUnavailable), store._when_full():
        raise OSError(number, "full")
    with pytest.raises(OSError), store._when_full():
        raise OSError(errno.EIO, "broken")
    with pytest.raises(StoreUnavailable), store._when_full(errno.EIO):
        raise OSError(errno.EIO, "broken")


class Snapshot(Compaction):
    """Nothing but a snapshot."""

    rewritten = None

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def finished(self) -> None:
        return None

    def snapshot(self, history: int) -> bytes:
        return b"snapshot"

    def wanted(self) -> list[Location]:
        return []


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_new_segment_takes_the_place_of_the_former_one_and_of_its_handle(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.compact(Snapshot(1), 0) == 0
    before = open_files()
    for seq in range(2, 6):
        store.compact(Snapshot(seq), 0)
        assert [path.name for path in store.path.glob("*.log")] == [f"{seq:08d}.log"]

    def fails(file: SegmentFile) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(SegmentFile, "sync", fails)
    with pytest.raises(OSError):
        store.compact(Snapshot(6), 0)
    assert [path.name for path in store.path.glob("*.log")] == ["00000005.log"]
    assert open_files() == before
    assert [record.seq for record in store.load().records] == [5]
    assert store.size_bytes() == sum(path.stat().st_blocks * 512 for path in store.path.iterdir())
