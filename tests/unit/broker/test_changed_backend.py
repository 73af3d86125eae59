"""A run whose broker.store or disk changes between two starts."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.contract import LearnerReport
from broker.journal.file_store.folder import StoreFolder
from broker.journal.recovery import Memory, open_memory
from broker.journal.redis_store.leading import Leading
from broker.main import run_info
from common.config.schema import BrokerConfig, Config, ModelConfig, RunConfig, TasksConfig
from common.errors import UsageError
from common.process.run_dir import RunDir
from common.rollouts import Task
from tests.redis_server import RedisServer
from tests.unit.broker.durable_rig import files_may_not_grow_beyond


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", {"appendonly": "yes", "appendfsync": "always"})
    yield started
    started.kill()


def job(folder: Path, **broker: object) -> Config:
    return Config(
        run=RunConfig(name=f"{folder.parent.name}", dir=str(folder), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        broker=msgspec.convert(broker, BrokerConfig),
    )


def files(folder: Path) -> Memory:
    config = job(folder)
    return open_memory(config, run_info(config, b""), lambda event: None)


def in_redis(server: RedisServer, folder: Path) -> None:
    """A broker with broker.store: redis comes and goes."""
    config = job(folder, store="redis", redis=server.address)
    leading = Leading(config, str(folder))
    assert leading.take("tcp://127.0.0.1:1") is None
    try:
        open_memory(config, run_info(config, b""), lambda event: None, leading).close()
    finally:
        leading.term.resign()


def test_a_run_that_went_on_in_redis_does_not_take_up_its_former_store_again(
    server: RedisServer, tmp_path: Path
) -> None:
    """Its groups may have been trained on meanwhile, and its serials stand for other prompts."""
    run = tmp_path / "run"
    run.mkdir()
    first = files(run)
    first.state.attach(LearnerReport(1, 1, "training", 0))
    first.state.offer([Task(s, b"{}", s, 2) for s in range(4)])
    assert first.journal is not None
    first.journal.end_turn()
    first.close()
    in_redis(server, run)
    again = files(run)
    told = again.state.attach(LearnerReport(1, 2, "training", 0))
    again.close()
    assert told.next_serial == 0
    assert told.store_id != first.state.store_id
    assert (run / "store-1" / "store.json").exists()
    assert (run / "redis-1.json").exists()
    with pytest.raises(UsageError, match=r"redis\.json names none"):
        in_redis(server, run)


def test_a_run_of_the_former_redis_backend_is_refused_with_a_sentence(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    config = job(run.path)
    run.prepare(config)
    text = run.config.read_text()
    run.config.write_text(text.replace("  store: file\n", "  backend: zeromq\n").replace("  redis: null\n", ""))
    run.prepare(config)
    run.config.write_text(text.replace("  store: file\n", "  backend: redis\n").replace("  redis: null\n", ""))
    with pytest.raises(UsageError, match=r"begun with broker\.backend: redis, which this release cannot continue"):
        run.prepare(config)


def test_a_store_can_be_locked_on_a_full_disk(tmp_path: Path) -> None:
    folder, other = StoreFolder(tmp_path / "store"), StoreFolder(tmp_path / "store")
    with files_may_not_grow_beyond(0):
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
