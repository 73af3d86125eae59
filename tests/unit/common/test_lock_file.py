"""A lock keeps other processes out until its process ends, and names it."""

import os
import signal
from pathlib import Path

import pytest

from common.process.lock_file import AlreadyLocked, is_locked, lock_holder, take_lock


def test_a_lock_keeps_others_out_and_names_its_process(tmp_path: Path) -> None:
    path = tmp_path / "up.lock"
    assert not is_locked(path)
    with take_lock(path):
        assert (is_locked(path), lock_holder(path)) == (True, os.getpid())
        with pytest.raises(AlreadyLocked) as caught:
            take_lock(path)
        assert caught.value.holder == str(os.getpid())
    assert not is_locked(path)
    take_lock(path).close()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    path, (ready, done) = tmp_path / "up.lock", os.pipe()
    child = os.fork()
    if child == 0:
        taken = take_lock(path)
        assert taken.name
        os.write(done, b"1")
        signal.pause()
    assert os.read(ready, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    take_lock(path).close()
    os.close(ready)
    os.close(done)
