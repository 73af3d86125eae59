"""Shared memory files of engines that were killed are removed; all others stay."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from rollout_fleet.vllm_patches.shared_files import PREFIX, Worker, record, remove_left_files

WORKER = """
import mmap, msgspec, sys, time
from pathlib import Path
from rollout_fleet.vllm_patches.shared_files import this_worker
kept = []
for name in sys.argv[2:]:
    path = Path(sys.argv[1], name)
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        kept.append(mmap.mmap(file.fileno(), 4096))
sys.stdout.buffer.write(msgspec.json.encode(this_worker(Path(sys.argv[1]))) + b"\\n")
sys.stdout.flush()
time.sleep(3600)
"""

Start = Callable[..., tuple[subprocess.Popen[bytes], Worker]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that maps new files of the given names, and get what it says of itself."""
    processes: list[subprocess.Popen[bytes]] = []

    def one(*names: str) -> tuple[subprocess.Popen[bytes], Worker]:
        command = [sys.executable, "-c", WORKER, str(tmp_path), *names]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None
        return processes[-1], msgspec.json.decode(processes[-1].stdout.readline(), type=Worker)

    yield one
    for process in processes:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_of_a_killed_engine_are_removed_once_its_last_worker_is_dead(tmp_path: Path, start: Start) -> None:
    record([Worker(os.getpid(), 1, {})], tmp_path)
    assert names(tmp_path) == set(), "an engine without shared files leaves no record"
    (first, one), (second, two) = start("vllm_dist_a-shm_0", "psm_b"), start("vllm_dist_a-shm_1")
    assert set(one.files) == {"vllm_dist_a-shm_0", "psm_b"} and set(two.files) == {"vllm_dist_a-shm_1"}
    record([one, two], tmp_path)
    (tmp_path / "vllm_dist_of_somebody_else").touch()
    assert remove_left_files(tmp_path) == []
    kill(first)
    assert remove_left_files(tmp_path) == []
    kill(second)
    assert set(remove_left_files(tmp_path)) == {"vllm_dist_a-shm_0", "psm_b", "vllm_dist_a-shm_1"}
    assert names(tmp_path) == {"vllm_dist_of_somebody_else"}


def test_neither_a_new_process_with_the_old_number_nor_a_new_file_with_the_old_name_is_taken_for_the_old_one(
    tmp_path: Path, start: Start
) -> None:
    process, worker = start("left", "reused")
    kill(process)
    record([msgspec.structs.replace(worker, pid=os.getpid())], tmp_path)
    (tmp_path / "other").touch()  # a new inode for certain: the old file is still there
    (tmp_path / "other").replace(tmp_path / "reused")
    assert remove_left_files(tmp_path) == ["left"] and names(tmp_path) == {"reused"}


@pytest.mark.parametrize("spoiled", ["another container", "torn", "a path"])
def test_a_record_that_cannot_be_trusted_removes_nothing(tmp_path: Path, start: Start, spoiled: str) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    process, worker = start("outside")
    kill(process)
    inode = (tmp_path / "outside").stat().st_ino
    record([msgspec.structs.replace(worker, files={"../outside": inode})], folder)
    (path,) = folder.glob(f"{PREFIX}*")
    if spoiled == "another container":
        path.write_bytes(path.read_bytes().replace(b'"pid:[', b'"pid:[9').replace(b"../outside", b"inside"))
        (folder / "inside").hardlink_to(tmp_path / "outside")
    elif spoiled == "torn":
        path.write_bytes(path.read_bytes()[:-5])
    before = names(folder) - {path.name}
    assert remove_left_files(folder) == []
    assert names(folder) - {path.name} == before and (tmp_path / "outside").exists()
