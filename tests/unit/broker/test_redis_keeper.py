"""The keeper: what it demands of a server, whose run it takes up, and what it leaves in the run's folder."""

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.connect import Access, connect
from broker.contract import LearnerReport, NodeReport
from broker.redis.acl import acl_line
from broker.redis.async_client import AsyncRedisClient
from broker.redis.checks import check_server
from broker.redis.endpoint import endpoint
from broker.redis.keeper import Keeper, Seen, only_keeper
from broker.redis.link import Link
from common.config.schema import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, TasksConfig
from common.errors import BrokerUnreachable, UsageError
from common.process.run_dir import RunDir
from common.rollouts import GroupMeta, Task
from tests.redis_server import RedisServer

SAFE = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", SAFE)
    yield started
    started.kill()


def config(server: RedisServer, run_dir: Path, **broker: object) -> Config:
    section = {"backend": "redis", "address": server.address, "lease_s": 1.0, **broker}
    return Config(
        run=RunConfig(name="kept", dir=str(run_dir), steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        learner=LearnerConfig(groups_per_step=2),
        broker=msgspec.convert(section, BrokerConfig),
    )


def keeper(server: RedisServer, run_dir: Path, **broker: object) -> Keeper:
    run_dir.mkdir(exist_ok=True)
    job = config(server, run_dir, **broker)
    made = Keeper(job, msgspec.json.encode(job))
    try:
        made.open()
    except BaseException:
        made.close()
        raise
    return made


def check(server: RedisServer, durability: str, credentials: str | None = None) -> None:
    link = Link(endpoint(server.address, "broker", credentials), "broker", 10)
    try:
        check_server(link, durability, time.monotonic() + 10)
    finally:
        link.close()


@pytest.mark.parametrize(
    ("setting", "value", "durability", "words"),
    [
        ("maxmemory-policy", "allkeys-lru", "memory", "maxmemory-policy allkeys-lru, expected noeviction"),
        ("appendonly", "no", "everysec", "appendonly no, expected yes, because broker.durability is everysec"),
        ("appendonly", "no", "fsync", "CONFIG SET appendonly yes"),
        ("appendfsync", "everysec", "fsync", "appendfsync everysec, expected always"),
        ("appendfsync", "no", "everysec", "appendfsync no, expected always or everysec"),
    ],
)
def test_a_setting_that_loses_data_is_refused_with_what_was_found_and_how_to_set_it(
    server: RedisServer, setting: str, value: str, durability: str, words: str
) -> None:
    server.ask("CONFIG", "SET", setting, value)
    with pytest.raises(UsageError) as caught:
        check(server, durability)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("append", "fsync", "durability"),
    [
        ("yes", "always", "fsync"),
        ("yes", "always", "everysec"),
        ("yes", "everysec", "everysec"),
        ("no", "no", "memory"),
    ],
)
def test_a_server_that_keeps_at_least_what_is_asked_passes(
    server: RedisServer, append: str, fsync: str, durability: str
) -> None:
    server.ask("CONFIG", "SET", "appendonly", append)
    server.ask("CONFIG", "SET", "appendfsync", fsync)
    check(server, durability)


def test_where_config_is_not_permitted_info_is_judged_and_that_is_said(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = acl_line("broker", "kept", "p").replace(" +config|get", "")
    server.ask("ACL", "SETUSER", *line.split())
    (tmp_path / "broker.password").write_text("p")
    check(server, "everysec", str(tmp_path))
    assert "CONFIG is not permitted" in caplog.text
    assert "appendfsync of the Redis server" in caplog.text
    server.ask("CONFIG", "SET", "appendonly", "no")
    with pytest.raises(UsageError, match="appendonly no, expected yes"):
        check(server, "everysec", str(tmp_path))
    server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
    with pytest.raises(UsageError, match="maxmemory-policy volatile-ttl"):
        check(server, "memory", str(tmp_path))


def test_a_replica_is_refused(server: RedisServer) -> None:
    server.ask("REPLICAOF", "127.0.0.1", server.port)
    with pytest.raises(UsageError, match="is a replica, expected the primary"):
        check(server, "memory")


def test_an_old_server_is_refused() -> None:
    class OldLink:
        endpoint = endpoint("redis://127.0.0.1", "broker", None)

        def run(self, build: object, end: float) -> list[bytes]:
            return [b"# Server\r\nredis_version:5.0.14\r\n"]

    with pytest.raises(UsageError, match=r"has version 5\.0\.14, expected 6\.2 or later"):
        check_server(OldLink(), "memory", 0.0)  # type: ignore[arg-type]


def test_a_run_of_another_folder_keeps_its_name(server: RedisServer, tmp_path: Path) -> None:
    keeper(server, tmp_path / "one").close()
    with pytest.raises(UsageError, match=r"has a run kept of the folder .*/one, and this one is .*/two"):
        keeper(server, tmp_path / "two")


def test_a_folder_that_was_emptied_does_not_take_up_its_former_run(server: RedisServer, tmp_path: Path) -> None:
    keeper(server, tmp_path / "one").close()
    (tmp_path / "one" / "redis.json").unlink()
    with pytest.raises(UsageError, match=r"redis\.json is missing: .* docs/redis\.md"):
        keeper(server, tmp_path / "one")


def test_a_run_is_continued_with_its_tasks_under_changed_settings(server: RedisServer, tmp_path: Path) -> None:
    first = keeper(server, tmp_path / "one")
    learner = connect(Access(address=first.address, role="learner", deadline_s=10))
    store = learner.attach(LearnerReport(1, 1, "training", 0)).store_id
    learner.offer([Task(0, b"{}", 0, 1)])
    first.close()
    second = keeper(server, tmp_path / "one", max_bytes=5 << 30)
    attached = learner.attach(LearnerReport(1, 2, "training", 0))
    assert (attached.store_id, attached.next_serial) == (store, 1)
    assert learner.status().run.max_bytes == 5 << 30
    learner.close()
    second.close()


def test_events_ledger_and_status_are_mirrored_into_the_folder_once(server: RedisServer, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    first = keeper(server, run_dir)
    with connect(Access(address=first.address, role="learner", deadline_s=10)) as learner:
        learner.attach(LearnerReport(1, 1, "training", 0))
        learner.offer([Task(0, b"{}", 0, 1)])
        first.tick()
        first.finish()
        first.close()
        learner.attach(LearnerReport(1, 2, "training", 0))
    second = keeper(server, run_dir)
    second.tick()
    second.tick()
    second.close()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [(e["index"], e["kind"]) for e in events] == [(0, "learner_attached"), (1, "learner_attached")]
    assert [e["state"] for e in json.loads((run_dir / "ledger.json").read_text())] == ["pending"]
    assert json.loads((run_dir / "status.json").read_text())["groups_pending"] == 1


def test_a_silent_node_loses_its_lease_to_the_keepers_sweep(server: RedisServer, tmp_path: Path) -> None:
    kept = keeper(server, tmp_path / "one", lease_s=0.3)

    async def node() -> None:
        async with AsyncRedisClient(kept.address, deadline_s=10) as client:
            await client.register(NodeReport("n0", 1, "h", "generating", 0))
            await client.lease("n0", 0, 1, 5)

    with connect(Access(address=kept.address, role="learner", deadline_s=10)) as learner:
        learner.offer([Task(0, b"{}", 0, 1)])
    asyncio.run(node())
    time.sleep(0.4)
    kept.tick()
    with connect(Access(address=kept.address, role="observer", deadline_s=10)) as observer:
        assert observer.status().lease_expiries == 1
    kept.close()


def test_payloads_that_nobody_has_are_dropped_and_no_others(server: RedisServer, tmp_path: Path) -> None:
    kept = keeper(server, tmp_path / "one", retain_steps=1)

    async def node() -> list[str]:
        async with AsyncRedisClient(kept.address, deadline_s=10) as client:
            await client.register(NodeReport("n0", 1, "h", "generating", 9))
            leases = await client.lease("n0", 9, 4, 5)
            for lease in leases[:3]:
                assert await client.complete("n0", lease.token, GroupMeta(0, 0, 0.0, 1), b"x")
            return [lease.token for lease in leases]

    with connect(Access(address=kept.address, role="learner", deadline_s=10)) as learner:
        learner.offer([Task(n, b"{}", n, 1) for n in range(5)])
        tokens = asyncio.run(node())
        learner.take(0, 1, 1.0)
        learner.commit(0)  # recorded, and no longer living
        learner.take(1, 1, 1.0)
    before = set(server.ask("KEYS", "*:p:*"))  # type: ignore[call-overload]
    assert len(before) == 3
    prefix = f"slipstream:{{kept}}:{kept.store}:p:"
    on_its_way = f"{prefix}{tokens[3]}:01".encode()
    for name in (on_its_way, f"{prefix}{tokens[0]}:02", f"{prefix}4.dead:03", f"{prefix}77.dead:04"):
        server.ask("SET", name, "x")
    kept.tick()
    assert set(server.ask("KEYS", "*:p:*")) == {*before, on_its_way}  # type: ignore[call-overload]
    kept.close()


def test_a_redis_that_forgot_everything_gets_a_new_store_and_the_ledger_is_kept(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = keeper(server, tmp_path / "one")
    with connect(Access(address=kept.address, role="learner", deadline_s=10)) as learner:
        before = learner.attach(LearnerReport(1, 1, "training", 0)).store_id
        learner.offer([Task(0, b"{}", 0, 1)])
        kept.finish()
        server.ask("FLUSHALL")
        kept.tick()
        after = learner.attach(LearnerReport(1, 2, "training", 0))
    assert after.store_id != before and after.next_serial == 0
    assert "its memory is gone" in caplog.text
    assert json.loads((tmp_path / "one" / "ledger-1.json").read_text())[0]["serial"] == 0
    seen = msgspec.json.decode((tmp_path / "one" / "redis.json").read_bytes(), type=Seen)
    assert (seen.store, seen.former) == (after.store_id, before)
    kept.close()


def test_the_keeper_itself_notices_that_redis_fell_back_while_nobody_else_was_there(
    server: RedisServer, tmp_path: Path
) -> None:
    kept = keeper(server, tmp_path / "one")
    store = kept.store
    with connect(Access(address=kept.address, role="learner", deadline_s=10)) as learner:
        learner.attach(LearnerReport(1, 1, "training", 0))
        learner.offer([Task(0, b"{}", 0, 1)])
    kept.tick()
    kept.close()
    server.ask("HSET", f"slipstream:{{kept}}:{store}:state", "epoch", 0)  # as a replica that lagged
    again = keeper(server, tmp_path / "one")
    again.tick()
    assert again.store != store
    again.close()


def test_a_server_that_is_away_is_survived(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.redis.keeper.ASK_S", 0.3)
    kept = keeper(server, tmp_path / "one")
    server.kill()
    kept.tick()
    kept.tick()
    assert caplog.text.count("going on as soon as that is over") == 1
    server.start()
    caplog.set_level(logging.INFO)
    kept.tick()
    assert "Redis answers again" in caplog.text
    kept.close()


def test_a_second_keeper_of_a_folder_is_refused(tmp_path: Path) -> None:
    with only_keeper(tmp_path), pytest.raises(UsageError, match="already has a broker"), only_keeper(tmp_path):
        pass


def test_slipstream_broker_runs_the_keeper_and_says_where(server: RedisServer, tmp_path: Path) -> None:
    program = "import sys,msgspec;from common.config.schema import Config;from broker.redis.keeper import run_keeper;"
    program += "d=sys.stdin.buffer.read();sys.exit(run_keeper(msgspec.json.decode(d,type=Config),d))"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config(server, tmp_path / "run")))
    process.stdin.close()
    run = RunDir(tmp_path / "run")
    end = time.monotonic() + 60
    while run.broker() is None:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    found = run.broker()
    assert found is not None and (found.pid, found.address) == (process.pid, server.address + "?run=kept")
    with connect(Access(address=found.address, role="observer", deadline_s=10)) as observer:
        assert observer.status().pid == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert run.broker() is None and (run.path / "ledger.json").read_bytes() == b"[]"


def test_a_server_that_is_down_is_said_to_be_waited_for_at_once_and_the_key_is_named_in_the_end(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("broker.redis.keeper.START_S", 0.3)
    server.kill()
    with pytest.raises(
        BrokerUnreachable, match=rf"broker.address: Redis at redis://127.0.0.1:{server.port}/0 does not"
    ):
        keeper(server, tmp_path / "run")
    assert f"waiting for Redis at redis://127.0.0.1:{server.port}/0 (broker.address)" in caplog.text


def test_a_server_that_comes_up_later_is_taken(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    later = threading.Timer(0.5, server.start)
    later.start()
    keeper(server, tmp_path / "run").close()
    later.join()
    assert "waiting for Redis at" in caplog.text
