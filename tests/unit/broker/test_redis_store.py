"""The Redis store: settings of the server, its ACL line, lost records, and what belongs to which run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.contract import LearnerReport, NodeReport, RunInfo
from broker.delivery.event_log import EventLog
from broker.delivery.state import DeliveryState
from broker.journal.journal import Journal
from broker.journal.recovery import Memory, recover
from broker.journal.redis_store.checks import check_server
from broker.journal.redis_store.connection import open_client
from broker.journal.redis_store.keys import acl_line
from broker.journal.redis_store.leading import Leading
from broker.journal.redis_store.store import RedisStore
from broker.journal.redis_store.term import Term
from broker.journal.run_folder import RunFolder
from broker.journal.store import StoreFenced, StoreUnavailable
from common.config.schema import BrokerConfig, Config, ModelConfig, RunConfig, TasksConfig
from common.errors import BrokerError, UsageError
from common.rollouts import GroupMeta, Task
from tests.redis_server import RedisServer
from tests.waiting import until

META = GroupMeta(version_min=0, version_max=0, reward_mean=0.5, sampled_tokens=10)
SAFE = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", SAFE)
    yield started
    started.kill()


def new_store(server: RedisServer, client: Any) -> RedisStore:
    """The store of the run NAME of the folder /run, led for a new term."""
    term = Term(client, server.address, "NAME", "/run")
    assert term.take("tcp://127.0.0.1:1") is None
    return RedisStore(term)


def lead(server: RedisServer, run_dir: Path) -> Leading:
    """A broker of the run NAME on its way to the lead."""
    config = Config(
        run=RunConfig(name="NAME", dir=str(run_dir), steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none"),
        broker=BrokerConfig(store="redis", redis=server.address),
    )
    run_dir.mkdir(exist_ok=True)
    return Leading(config, str(run_dir))


def takes(leading: Leading) -> bool:
    try:
        return leading.take("tcp://127.0.0.1:2") is None
    except StoreUnavailable:
        return False


class Broker:
    """A delivery state in Redis, without sockets."""

    def __init__(self, server: RedisServer, store: RedisStore | None = None) -> None:
        self.server = server
        store = store or new_store(server, server.client())
        self.term = store.term
        self.events = EventLog()
        run = RunInfo("NAME", "/run", 2, 3, 3, 1000.0, 1 << 30)

        self.journal = Journal(store, "fsync")
        self.state = DeliveryState(run, events=self.events, recorder=self.journal, retain_steps=2)
        recover(self.journal, self.state)

    def settle(self) -> None:
        last = self.journal.end_turn()
        until(lambda: self.journal.end_turn() >= last and self.journal.acknowledged >= last, "acknowledged records")

    def group(self, serial: int) -> None:
        """A ready group."""
        self.state.offer([Task(serial, b"{}", serial, 2)])
        (lease,) = self.state.lease("n0", 1 << 20, 1)
        payload = b"group %d" % serial
        assert self.state.complete("n0", lease.token, META, payload, len(payload))

    def begin(self) -> None:
        self.state.attach(LearnerReport(1, 1, "training", 0))
        self.state.register(NodeReport("n0", 1, "h", "generating", 0))

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.after(-1)]


@pytest.mark.parametrize(
    ("setting", "value", "found"),
    [
        ("maxmemory-policy", "allkeys-lru", "maxmemory-policy allkeys-lru, expected noeviction"),
        ("appendonly", "no", "appendonly no, expected yes"),
        ("appendfsync", "everysec", "appendfsync everysec, expected always"),
    ],
)
def test_a_setting_that_loses_data_is_refused(server: RedisServer, setting: str, value: str, found: str) -> None:
    check_server(server.client(), server.address, "fsync")
    server.ask("CONFIG", "SET", setting, value)
    with pytest.raises(UsageError, match=found):
        check_server(server.client(), server.address, "fsync")


def test_a_replica_is_refused(server: RedisServer) -> None:
    server.ask("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(UsageError, match="is a replica"):
        check_server(server.client(), server.address, "fsync")


def test_the_acl_line_suffices_for_a_broker_and_keeps_it_to_its_run(server: RedisServer, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "redis.md"
    assert f"user {acl_line('NAME', 'PASSWORD')}\n" in page.read_text()
    server.ask("ACL", "SETUSER", *acl_line("NAME", "secret").split())
    (tmp_path / "broker.password").write_text("secret\n")
    client = open_client(server.address, str(tmp_path))
    check_server(client, server.address, "fsync")
    broker = Broker(server, new_store(server, client))
    broker.begin()
    broker.group(0)
    broker.settle()
    assert broker.journal.close()
    broker.term.resign()
    with pytest.raises(BrokerError, match="refuses the broker"):
        Term(client, server.address, "OTHER", "/run").take("tcp://127.0.0.1:1")


def test_a_wrong_password_is_said_and_not_shown(server: RedisServer, tmp_path: Path) -> None:
    server.ask("ACL", "SETUSER", *acl_line("NAME", "secret").split())
    (tmp_path / "broker.password").write_text("wrong-one")
    with pytest.raises(BrokerError, match="refuses the broker") as error:
        check_server(open_client(server.address, str(tmp_path)), server.address, "fsync")
    assert "wrong-one" not in str(error.value)


def test_a_living_leader_writes_again_what_redis_has_lost(server: RedisServer) -> None:
    broker = Broker(server)
    broker.begin()
    broker.group(0)
    broker.settle()
    server.ask("FLUSHALL")
    broker.group(1)
    broker.settle()
    assert "store_rewritten" in broker.kinds()
    assert broker.journal.close()
    broker.term.resign()
    again = Broker(server)
    groups = again.state.take(0, 2)
    assert groups is not None
    assert [entry.payload.read() for entry in again.state.tasks.living.values()] == [b"group 0", b"group 1"]
    again.journal.close()


def test_a_ready_group_whose_payload_is_lost_becomes_pending(server: RedisServer) -> None:
    broker = Broker(server)
    broker.begin()
    broker.group(0)
    broker.group(1)
    broker.settle()
    assert broker.journal.close()
    broker.term.resign()
    payloads = server.ask("KEYS", "*:p:*")
    server.ask("DEL", sorted(payloads)[0])
    again = Broker(server)
    assert [entry.state for entry in again.state.ledger()] == ["pending", "ready"]
    assert "groups_lost" in again.kinds()
    again.journal.close()


def test_a_leader_of_an_earlier_term_can_write_nothing(server: RedisServer) -> None:
    broker = Broker(server)
    broker.begin()
    broker.settle()
    server.ask("DEL", "slipstream:{NAME}:leader")
    later = Broker(server)
    broker.state.offer([Task(0, b"{}", 0, 2)])
    with pytest.raises(StoreFenced, match="leads in term 2; this one led in term 1"):
        broker.settle()
    assert later.state.tasks.next_serial == 0
    later.journal.close()


def test_a_new_leader_says_what_redis_has_lost_and_begins_an_empty_store(server: RedisServer, tmp_path: Path) -> None:
    first = lead(server, tmp_path)
    assert first.take("tcp://127.0.0.1:1") is None
    store = first.open()
    first.remember("tcp://127.0.0.1:1", 7)
    first.term.resign()
    second = lead(server, tmp_path)
    with pytest.raises(StoreUnavailable, match="lacks records up to 7; its former leader has 6 s to go on"):
        second.take("tcp://127.0.0.1:1")
    until(lambda: takes(second), "the time of the former leader")
    assert second.open().store_id != store.store_id
    assert second.lost == f"store {store.store_id} is gone, with all its records up to 7"
    second.term.resign()


def test_a_standby_leaves_an_emptied_server_to_the_leader_that_is_alive(server: RedisServer, tmp_path: Path) -> None:
    first = lead(server, tmp_path)
    assert first.take("tcp://127.0.0.1:1") is None
    broker = Broker(server, first.open())
    broker.begin()
    broker.group(0)
    broker.settle()
    first.remember("tcp://127.0.0.1:1", broker.journal.acknowledged)
    standby = lead(server, tmp_path)
    assert standby.take("tcp://127.0.0.1:2") is not None
    server.ask("FLUSHALL")
    assert not takes(standby)
    broker.group(1)
    broker.settle()
    assert "store_rewritten" in broker.kinds()
    found = standby.take("tcp://127.0.0.1:2")
    assert found is not None and found.address == "tcp://127.0.0.1:1"
    assert broker.journal.close()
    first.term.resign()


def test_a_leader_that_was_stopped_while_it_opened_its_store_leaves_the_note_of_its_successor(
    server: RedisServer, tmp_path: Path
) -> None:
    first, second = lead(server, tmp_path), lead(server, tmp_path)
    assert first.take("tcp://127.0.0.1:1") is None
    server.ask("DEL", "slipstream:{NAME}:leader")  # its term runs out
    assert second.take("tcp://127.0.0.1:2") is None
    second.open()
    note = (tmp_path / "redis.json").read_bytes()
    with pytest.raises(StoreFenced, match=r"the broker of tcp://127\.0\.0\.1:2 .* leads in term 2"):
        first.open()
    assert (tmp_path / "redis.json").read_bytes() == note
    second.term.resign()


def test_a_term_is_renewed_while_a_store_is_read(server: RedisServer, tmp_path: Path) -> None:
    leading = lead(server, tmp_path)
    assert leading.take("tcp://127.0.0.1:1") is None
    lasts_ms = server.ask("PTTL", "slipstream:{NAME}:leader")
    with leading.term.renewing():
        until(lambda: server.ask("PTTL", "slipstream:{NAME}:leader") < lasts_ms - 500, "half a second of the term")
        until(lambda: server.ask("PTTL", "slipstream:{NAME}:leader") > lasts_ms - 250, "a longer term")
    leading.term.resign()


def test_a_second_run_of_the_same_name_is_refused_while_the_first_begins(server: RedisServer, tmp_path: Path) -> None:
    """Standing by for it would lead its clients to the other run's broker."""
    first = lead(server, tmp_path / "a")
    assert first.take("tcp://127.0.0.1:1") is None
    second = lead(server, tmp_path / "b")
    with pytest.raises(UsageError, match=rf"run\.name: .* in the folder {tmp_path}/a, and this one is {tmp_path}/b"):
        second.take("tcp://127.0.0.1:2")
    first.term.resign()


def test_a_run_of_another_folder_takes_no_term(server: RedisServer, tmp_path: Path) -> None:
    broker = Broker(server)
    broker.settle()
    broker.journal.close()
    broker.term.resign()
    with pytest.raises(UsageError, match=r"run\.name: .* in the folder /run, and this one"):
        lead(server, tmp_path / "b").take("tcp://127.0.0.1:2")
    assert server.ask("HGET", "slipstream:{NAME}:head", "term") == b"1"


def test_a_broker_whose_term_ended_before_it_served_writes_nothing(server: RedisServer, tmp_path: Path) -> None:
    leading = lead(server, tmp_path)
    assert leading.take("tcp://127.0.0.1:1") is None
    memory = Memory(Broker(server, leading.open()).state)
    leading.term.resign()
    with pytest.raises(StoreFenced, match="has ended before it served"):
        RunFolder(tmp_path, leading).begin(memory, "tcp://127.0.0.1:1")
    assert not (tmp_path / "broker.json").exists()


def test_a_run_of_another_folder_keeps_its_name(server: RedisServer) -> None:
    broker = Broker(server)
    broker.settle()
    with pytest.raises(UsageError, match=r"run\.name: .* in the folder /run"):
        RedisStore(Term(server.client(), server.address, "NAME", "/elsewhere"))
    broker.journal.close()
