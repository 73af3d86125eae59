"""A run whose broker.backend or disk changes between two starts."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from broker.contract import LearnerReport
from broker.journal.file_store.folder import StoreFolder
from broker.journal.open_state import Memory, open_memory
from broker.main import run_info
from common.config.schema import BrokerConfig, Config, ModelConfig, RunConfig, TasksConfig
from common.errors import UsageError
from common.process.run_dir import RunDir
from common.rollouts import Task
from tests.redis_server import RedisServer
from tests.unit.broker.test_redis_keeper import SAFE, keeper


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", SAFE)
    yield started
    started.kill()


def embedded(folder: Path) -> Memory:
    config = Config(
        run=RunConfig(name="kept", dir=str(folder), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        broker=msgspec.convert({}, BrokerConfig),
    )
    return open_memory(config, run_info(config, b""), lambda event: None)


def test_a_run_that_went_on_in_redis_does_not_take_up_its_former_store_again(
    server: RedisServer, tmp_path: Path
) -> None:
    """Its groups may have been trained on meanwhile, and its serials stand for other prompts."""
    run = tmp_path / "run"
    run.mkdir()
    first = embedded(run)
    first.state.attach(LearnerReport(1, 1, "training", 0))
    first.state.offer([Task(s, b"{}", s, 2) for s in range(4)])
    assert first.journal is not None
    first.journal.end_turn()
    first.close()
    keeper(server, run).close()
    again = embedded(run)
    told = again.state.attach(LearnerReport(1, 2, "training", 0))
    again.close()
    assert told.next_serial == 0
    assert told.store_id != first.state.store_id
    assert (run / "store-1" / "store.json").exists()
    assert (run / "redis-1.json").exists()
    with pytest.raises(UsageError, match=r"redis\.json is missing"):
        keeper(server, run)
    assert StoreFolder(run / "store").info() is not None, "a refused keeper moves nothing"


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_store_can_be_locked_on_a_full_disk(tmp_path: Path) -> None:
    folder, other = StoreFolder(tmp_path / "store"), StoreFolder(tmp_path / "store")
    with full_disk():
        folder.lock()
        with pytest.raises(UsageError, match="process unknown writes its store"):
            other.lock()
        folder.unlock()
        other.lock()
        other.unlock()


def test_a_store_that_cannot_be_locked_says_why(tmp_path: Path) -> None:
    (tmp_path / "store" / "lock").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"store: the store cannot be locked: .*Is a directory"):
        StoreFolder(tmp_path / "store").lock()


def test_a_run_folder_that_cannot_be_made_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(
        run=RunConfig(name="kept", dir=str(tmp_path / "file" / "run"), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
    )
    with pytest.raises(UsageError, match=r"run\.dir: .*file/run cannot be written"):
        RunDir(config.run.dir).prepare(config)
