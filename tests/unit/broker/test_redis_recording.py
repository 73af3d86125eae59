"""A run of broker.backend: redis as a recording: what open_recording gives, what it refuses, what a replay serves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.contract import LearnerReport, NodeReport
from broker.journal.recording import Recording, open_recording, preloaded
from broker.main import run_info
from broker.messaging.sync_client import BrokerClient
from broker.redis.acl import acl_line
from broker.redis.async_client import AsyncRedisClient
from broker.redis.client import RedisClient
from broker.redis.keeper import Keeper, only_keeper
from common.config.schema import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, TasksConfig
from common.errors import BrokerError, UsageError
from common.process.run_dir import RunDir
from common.redis_address import with_run
from common.rollouts import GroupMeta, Task
from launch.cli import main
from launch.replay.replay import serving
from tests.redis_server import RedisServer

META = GroupMeta(0, 1, 0.5, 8)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", {"appendonly": "yes", "appendfsync": "always"})
    yield started
    started.kill()


@pytest.fixture
def config(server: RedisServer, tmp_path: Path) -> Config:
    return job(server, tmp_path / "run")


@pytest.fixture
def run(config: Config) -> RunDir:
    """Prepared as `up` does it."""
    made = RunDir(config.run.dir)
    made.prepare(config)
    return made


def job(server: RedisServer, folder: Path, **broker: object) -> Config:
    section = {"backend": "redis", "address": server.address, "retain_steps": 2, **broker}
    return Config(
        run=RunConfig(name="demo", dir=str(folder), steps=10),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        learner=LearnerConfig(groups_per_step=2),
        broker=msgspec.convert(section, BrokerConfig),
    )


def report(state: str) -> LearnerReport:
    return LearnerReport(7, 1, state, 0, instance="a")


def keep(config: Config) -> Keeper:
    made = Keeper(config, b"{}")
    made.open()
    return made


def record(config: Config, last_state: str = "done") -> None:
    """A job that then ends: steps 0 to 2 are committed, one group of step 3 was filtered, and step 4 lacks one."""
    keeper, folder = keep(config), config.broker.credentials
    address = with_run(config.broker.address, config.run.name)
    try:
        with RedisClient(address, credentials=folder, deadline_s=10) as learner:
            learner.attach(report("training"))
            learner.offer([Task(serial, b"{}", serial, 2) for serial in range(11)])
            asyncio.run(_generate(address, folder, 11))
            for step in range(4):
                assert learner.take(step, 2, 1.0) is not None
            learner.filter(3, [6], 4)
            assert learner.take(3, 2, 1.0) is not None
            assert learner.take(4, 2, 1.0) is not None
            learner.filter(4, [9], 4)  # nobody has made the group that takes its place
            learner.commit(2)
            learner.report(report(last_state))
    finally:
        keeper.finish()
        keeper.close()


async def _generate(address: str, folder: str | None, count: int) -> None:
    """Every task handed in, the newest first."""
    async with AsyncRedisClient(address, credentials=folder, deadline_s=10) as broker:
        await broker.register(NodeReport("n0", 1, "h", "generating", 100))
        for lease in reversed(await broker.lease("n0", 100, count, 5)):
            assert await broker.complete("n0", lease.token, META, b"group %d" % lease.task.serial)


def serials(recording: Recording) -> dict[int, list[int]]:
    return {step: [group.task.serial for group in groups] for step, groups in recording.steps.items()}


# ---------------------------------------------------------------- what it gives


def test_retained_committed_and_taken_steps_come_back_whole_in_their_order(run: RunDir, config: Config) -> None:
    record(config)
    with open_recording(run, config) as found:
        assert serials(found) == {1: [2, 3], 2: [4, 5], 3: [6, 7, 8]}
        assert found.next_serial == 11
        assert [group.filtered for group in found.steps[3]] == [True, False, False]
        for group in (group for groups in found.steps.values() for group in groups):
            assert group.stored.read() == b"group %d" % group.task.serial
            assert (group.node_id, group.meta) == ("n0", META)
        with pytest.raises(UsageError, match="already has a broker"):
            keep_locked(config)


def keep_locked(config: Config) -> None:
    with only_keeper(Path(config.run.dir)):
        raise AssertionError("a broker of the run could start")


def test_the_broker_of_a_replay_hands_out_what_redis_has(run: RunDir, config: Config, tmp_path: Path) -> None:
    record(config)
    replay = RunDir(tmp_path / "replay")
    replay.path.mkdir()
    own = msgspec.structs.replace(config, broker=BrokerConfig(address="tcp://127.0.0.1:0"))
    with open_recording(run, config) as found:
        state = preloaded(run_info(own, b""), found, [2, 3])
        with serving(state, own, replay), BrokerClient(replay_address(replay), deadline_s=20) as learner:
            assert learner.attach(report("starting")).committed_step == 1
            taken = [learner.take(step, 2, 1.0) for step in (2, 3)]
    assert [[g.payload for g in groups or []] for groups in taken] == [
        [b"group 4", b"group 5"],
        [b"group 6", b"group 7", b"group 8"],
    ]


def replay_address(replay: RunDir) -> str:
    file = replay.broker()
    assert file is not None
    return file.address


def test_a_redis_that_goes_away_during_a_replay_is_told_to_the_learner(
    run: RunDir, config: Config, server: RedisServer, tmp_path: Path
) -> None:
    record(config)
    replay = RunDir(tmp_path / "replay")
    replay.path.mkdir()
    own = msgspec.structs.replace(config, broker=BrokerConfig(address="tcp://127.0.0.1:0"))
    with open_recording(run, config) as found:
        state = preloaded(run_info(own, b""), found, [2, 3])
        with serving(state, own, replay), BrokerClient(replay_address(replay), deadline_s=30) as learner:
            learner.attach(report("starting"))
            server.kill()
            with pytest.raises(BrokerError, match=r"payload .* cannot be read: Redis at redis://.* does not answer"):
                learner.take(2, 2, 1.0)


def test_users_and_passwords_are_those_of_broker_credentials(server: RedisServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for role in ("broker", "learner", "node"):
        server.ask("ACL", "SETUSER", *acl_line(role, "demo", f"{role}'s").split())
        (keys / f"{role}.password").write_text(f"{role}'s\n")
    config = job(server, tmp_path / "run", credentials=str(keys))
    run = RunDir(config.run.dir)
    run.prepare(config)
    server.ask("ACL", "SETUSER", "default", "off")
    record(config)
    with open_recording(run, config) as found:
        assert serials(found) == {1: [2, 3], 2: [4, 5], 3: [6, 7, 8]}
        assert found.steps[1][0].stored.read() == b"group 2"
    (keys / "learner.password").write_text("another\n")
    with pytest.raises(UsageError, match=r"cannot be read: .*does not let the role learner in"):
        refuse(run, config)


# ---------------------------------------------------------------- what it refuses


def refuse(run: RunDir, config: Config) -> None:
    with open_recording(run, config):
        raise AssertionError("this cannot be replayed")


def test_a_run_that_works_is_not_replayed(run: RunDir, config: Config) -> None:
    record(config, last_state="training")
    with pytest.raises(UsageError, match=r"is running: its learner \(process 7\) was training \d s ago; stop the job"):
        refuse(run, config)
    with only_keeper(run.path), pytest.raises(UsageError, match=r"run is running: it has a broker; stop the job"):
        refuse(run, config)


def test_a_server_that_is_down_or_has_lost_the_run_is_named(run: RunDir, config: Config, server: RedisServer) -> None:
    record(config)
    server.ask("FLUSHALL")
    with pytest.raises(UsageError, match=r"broker.address: the recorded groups .* no run demo is on the Redis server"):
        refuse(run, config)
    server.kill()
    with pytest.raises(UsageError, match=r"broker.address: the recorded groups .* does not answer"):
        refuse(run, config)


def test_a_folder_that_never_ran_and_one_whose_store_was_replaced_are_refused(
    run: RunDir, config: Config, server: RedisServer
) -> None:
    with pytest.raises(UsageError, match=r"redis.json: expected the name of the run's store in Redis, found no such"):
        refuse(run, config)
    record(config)
    (run.path / "redis.json").write_text('{"store": "another"}')
    with pytest.raises(UsageError, match=r"has the store \w{16} under this run.name, and the groups of .* in another"):
        refuse(run, config)


def test_the_command_says_which_steps_are_retained(
    run: RunDir, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    record(config)
    assert main(["replay", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert "groups of step 0 are not retained: the run's store has those of steps 1, 2, 3" in said
    assert "broker.retain_steps: 2" in said
