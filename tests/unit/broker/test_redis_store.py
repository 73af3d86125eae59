"""The Redis store: settings of the server, its ACL line, lost records, and what belongs to which run."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.delivery.learner_rules import LearnerRules
from broker.journal import leader_election
from broker.journal.leader_election import LeaderElection
from broker.journal.records import PendingSnapshot
from broker.journal.recovery import OpenedState, open_state
from broker.journal.redis_server import check_server, open_client
from broker.journal.redis_store import TERM_S, RedisStore, Term
from broker.journal.run_folder import RunFolder
from broker.journal.store import StoreFenced, StoreUnavailable
from broker.main import BrokerSigns, run_info, stand_by_and_lead
from common.config.schema import Config
from common.errors import BrokerError, UsageError
from tests.rigs.brokers import DurableRig, full_disk, job, learner_report, tasks
from tests.rigs.redis_servers import RedisServer, acl_line, durable_redis, free_port
from tests.rigs.refusals import refused
from tests.rigs.waiting import until

HERE, ELSEWHERE = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    started = durable_redis(tmp_path / "server")
    yield started
    started.kill()


def rig_of(server: RedisServer, client: Any = None) -> DurableRig:
    """A broker of the run NAME of the folder /run, which leads in a new term."""
    term = Term(client or server.client(), server.address, "NAME", "/run")
    assert term.take(HERE) is None
    return DurableRig(RedisStore(term))


def ended(rig: DurableRig) -> None:
    """The broker gives its term back."""
    rig.close()
    rig.store.term.resign()


def config_of(server: RedisServer, run_dir: Path) -> Config:
    run_dir.mkdir(exist_ok=True)
    return job(run_dir, name="NAME", store="redis", redis=server.address)


def lead(server: RedisServer, run_dir: Path) -> LeaderElection:
    """A broker of the run NAME on its way to the lead."""
    return LeaderElection(config_of(server, run_dir), str(run_dir))


def leading(server: RedisServer, run_dir: Path) -> LeaderElection:
    """A broker of the run NAME that leads."""
    made = lead(server, run_dir)
    assert made.take(HERE) is None
    return made


def takes(leading: LeaderElection) -> bool:
    try:
        return leading.take(ELSEWHERE) is None
    except StoreUnavailable:
        return False


@pytest.mark.parametrize(
    ("command", "found", "expected"),
    [
        ("CONFIG SET maxmemory-policy allkeys-lru", "maxmemory-policy allkeys-lru", "noeviction"),
        ("CONFIG SET appendonly no", "appendonly no", "yes"),
        ("CONFIG SET appendfsync everysec", "appendfsync everysec", "always"),
        ("REPLICAOF 127.0.0.1 1", "replica", "primary"),
    ],
)
def test_a_server_that_loses_data_is_refused(server: RedisServer, command: str, found: str, expected: str) -> None:
    check_server(server.client(), server.address, "fsync")
    server.ask(*command.split())
    with refused(UsageError, found, expected):
        check_server(server.client(), server.address, "fsync")


def test_a_server_that_goes_away_while_its_settings_are_read_may_come_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server.client()
    read = client.config_get

    def killed(setting: str) -> Any:
        server.kill()
        return read(setting)

    monkeypatch.setattr(client, "config_get", killed)
    with refused(StoreUnavailable, server.address):
        check_server(client, server.address, "fsync")


def test_a_server_that_is_not_there_yet_is_waited_for_and_told_once(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = iter([StoreUnavailable("it loads its data")] * 2)

    def loads(*_: object) -> None:
        for reason in reasons:
            raise reason

    monkeypatch.setattr(leader_election, "check_server", loads)
    monkeypatch.setattr(leader_election, "PAUSE_S", 0.0)
    lead(server, tmp_path / "run").await_server()
    assert [record.name for record in caplog.records] == [leader_election.__name__]
    assert next(reasons, None) is None


def test_a_server_that_was_away_is_left_to_its_former_leader_for_a_term(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, standby, newcomer = leading(server, tmp_path), lead(server, tmp_path), lead(server, tmp_path)
    assert standby.take(ELSEWHERE) is not None

    def away() -> None:
        raise StoreUnavailable("it is away")

    for one in (standby, newcomer):
        with monkeypatch.context() as patched, pytest.raises(StoreUnavailable):
            patched.setattr(one.term, "about", away)
            one.take(ELSEWHERE)
    first.term.resign()
    assert not takes(standby), "it knows of a leader who may return"
    assert takes(newcomer)


def test_the_acl_line_suffices_for_a_broker_and_keeps_it_to_its_run(server: RedisServer, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "redis.md"
    assert f"user {acl_line('NAME', 'PASSWORD')}\n" in page.read_text()
    server.ask("ACL", "SETUSER", *acl_line("NAME", "secret").split())
    (tmp_path / "broker.password").write_text("secret\n")
    client = open_client(server.address, str(tmp_path))
    check_server(client, server.address, "fsync")
    rig = rig_of(server, client).begin()
    rig.ready()
    rig.settle()
    ended(rig)
    with refused(BrokerError, "run.name", "docs/redis.md"):
        Term(client, server.address, "OTHER", "/run").take(HERE)


def test_a_ready_group_whose_payload_is_lost_becomes_pending(server: RedisServer) -> None:
    rig = rig_of(server).begin()
    rig.ready(2)
    rig.settle()
    ended(rig)
    server.ask("DEL", sorted(server.ask("KEYS", "*:p:*"))[0])
    with rig_of(server) as again:
        assert [entry.state for entry in again.state.ledger()] == ["pending", "ready"]
        assert "groups_lost" in again.kinds()


def test_a_leader_of_an_earlier_term_can_write_nothing(server: RedisServer) -> None:
    rig = rig_of(server).begin()
    rig.settle()
    server.ask("DEL", "slipstream:{NAME}:leader")
    with rig_of(server) as later:
        rig.offer(1)
        with refused(StoreFenced, "term 2", "term 1"):
            rig.settle()
        assert later.state.tasks.next_serial == 0


def test_a_new_leader_says_what_redis_has_lost_and_begins_an_empty_store(server: RedisServer, tmp_path: Path) -> None:
    first = leading(server, tmp_path)
    store = first.open()
    first.remember(HERE, 7)
    first.term.resign()
    second = lead(server, tmp_path)
    with refused(StoreUnavailable, "up to 7", f"{TERM_S:g} s"):
        second.take(HERE)
    until(lambda: takes(second), "the time of the former leader")
    assert second.open().store_id != store.store_id
    assert store.store_id in second.lost and second.lost.endswith(" 7")
    second.term.resign()


def test_a_full_disk_ends_no_leader_and_what_its_folder_lacks_is_written_once_there_is_room(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("broker.journal.run_folder.STATUS_S", 0.0)
    leader, config = leading(server, tmp_path), config_of(server, tmp_path)
    folder = RunFolder(tmp_path, leader)
    memory = open_state(config, run_info(config, b""), folder.write_event, leader)
    folder.begin(memory, HERE)
    with full_disk(tmp_path):
        folder.tick()
    told = [message.split()[0] for message in caplog.messages if os.strerror(errno.EFBIG) in message]
    assert {"redis.json", "status"} <= {*told}
    assert not (tmp_path / "ledger.json").exists() and not list(tmp_path.glob(".*.json.*"))
    until(lambda: folder.tick() or (leader.pointer.address == HERE and (tmp_path / "status.json").exists()))
    memory.close()
    folder.close()
    leader.term.resign()


def test_a_leader_that_needs_long_to_encode_its_state_stays_the_leader(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.journal.redis_store.RENEW_S", 0.05)
    rig = rig_of(server).begin()
    rig.settle()
    term = rig.store.term

    class Slow(PendingSnapshot):
        def finished(self) -> bytes | None:
            before = term.ends
            until(lambda: term.ends > before, "the term to be renewed")
            return super().finished()

    rig.journal.seq += 1
    rig.journal._writer.put(Slow(rig.state, rig.journal.seq, rewritten=[]))
    rig.settle()
    assert rig.journal.acknowledged == rig.journal.seq
    ended(rig)


def test_a_standby_leaves_an_emptied_server_to_the_living_leader_which_writes_everything_again(
    server: RedisServer, tmp_path: Path
) -> None:
    first = leading(server, tmp_path)
    rig = DurableRig(first.open()).begin()
    payloads = rig.ready()
    rig.settle()
    first.remember(HERE, rig.journal.acknowledged)
    standby = lead(server, tmp_path)
    assert standby.take(ELSEWHERE) is not None
    server.ask("FLUSHALL")
    assert not takes(standby)
    payloads += rig.ready()
    rig.settle()
    assert "store_rewritten" in rig.kinds()
    found = standby.take(ELSEWHERE)
    assert found is not None and found.address == HERE
    ended(rig)
    assert takes(standby)
    with DurableRig(standby.open()) as again:
        assert LearnerRules(again.state).take(0, 2) is not None
        assert [entry.payload.read() for entry in again.state.tasks.living.values()] == payloads
    standby.term.resign()


def test_a_leader_that_was_stopped_while_it_opened_its_store_leaves_the_note_of_its_successor(
    server: RedisServer, tmp_path: Path
) -> None:
    first, second = leading(server, tmp_path), lead(server, tmp_path)
    server.ask("DEL", "slipstream:{NAME}:leader")  # its term runs out
    assert second.take(ELSEWHERE) is None
    second.open()
    note = (tmp_path / "redis.json").read_bytes()
    with refused(StoreFenced, ELSEWHERE, "term 2"):
        first.open()
    assert (tmp_path / "redis.json").read_bytes() == note
    second.term.resign()


def test_a_term_is_renewed_while_a_store_is_read(server: RedisServer, tmp_path: Path) -> None:
    def lasts_ms() -> int:
        return server.ask("PTTL", "slipstream:{NAME}:leader")

    leader = leading(server, tmp_path)
    whole = lasts_ms()
    with leader.term.renewing():
        until(lambda: lasts_ms() < whole - 500, "half a second of the term")
        until(lambda: lasts_ms() > whole - 250, "a longer term")
    leader.term.resign()


def test_a_second_run_of_the_same_name_takes_no_term_and_opens_no_store(server: RedisServer, tmp_path: Path) -> None:
    """Standing by for the first one would lead its clients to the other run's broker."""
    first = leading(server, tmp_path / "a")
    facts = ("run.name", f"{tmp_path}/a", f"{tmp_path}/b")
    for _ in range(2):  # while the first one begins, and after its end
        with refused(UsageError, *facts):
            lead(server, tmp_path / "b").take(ELSEWHERE)
        if first.term.number:
            DurableRig(first.open()).close()
            first.term.resign()
    with refused(UsageError, *facts):
        RedisStore(Term(server.client(), server.address, "NAME", f"{tmp_path}/b"))
    assert server.ask("HGET", "slipstream:{NAME}:head", "term") == b"1"


def test_a_broker_whose_term_ended_before_it_served_writes_nothing_frees_its_address_and_stands_by_again(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    config = job(tmp_path, name="NAME", store="redis", redis=server.address, address=f"tcp://127.0.0.1:{port}")
    monkeypatch.setattr(Term, "lapsed", True)
    signs = BrokerSigns()
    for number in (1, 2):
        assert stand_by_and_lead(config, run_info(config, b""), signs), "it is to stand by again"
        assert (signs.answer("/healthz")[0], signs.answer("/readyz")[0]) == (200, 503)
        assert f"tcp://127.0.0.1:{port}" in caplog.messages[-1]
        assert server.ask("HGET", "slipstream:{NAME}:head", "term") == b"%d" % number
        assert server.ask("EXISTS", "slipstream:{NAME}:leader") == 0, "the term was given back"
        socket.create_server(("127.0.0.1", port)).close()
    assert not (tmp_path / "broker.json").exists()


def test_a_run_that_went_on_in_redis_does_not_take_up_its_former_store_again(
    server: RedisServer, tmp_path: Path
) -> None:
    """Its groups may have been trained on meanwhile, and its serials stand for other prompts."""

    def opened(config: Config, leader: LeaderElection | None = None) -> OpenedState:
        return open_state(config, run_info(config, b""), lambda event: None, leader)

    def in_redis() -> None:
        leader = leading(server, tmp_path)
        try:
            opened(config_of(server, tmp_path), leader).close()
        finally:
            leader.term.resign()

    first = opened(job(tmp_path))
    LearnerRules(first.state).attach(learner_report())
    LearnerRules(first.state).offer(tasks(4))
    assert first.journal is not None
    first.journal.end_turn()
    first.close()
    in_redis()
    again = opened(job(tmp_path))
    told = LearnerRules(again.state).attach(learner_report(incarnation=2))
    again.close()
    assert told.next_serial == 0
    assert told.store_id != first.state.store_id
    assert (tmp_path / "store-1" / "store.json").exists()
    assert (tmp_path / "redis-1.json").exists()
    with refused(UsageError, "run.dir", "redis.json", "docs/redis.md"):
        in_redis()
