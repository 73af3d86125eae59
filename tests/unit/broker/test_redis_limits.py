"""A Redis that is full, or gone at a bad moment, and groups that are handed in once more when all is over."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.contract import NodeReport
from broker.redis.async_client import AsyncRedisClient
from broker.redis.client import RedisClient
from broker.redis.endpoint import endpoint
from broker.redis.hand_ins import HandIn
from broker.redis.keys import Keys
from broker.redis.recording import recorded_steps
from broker.redis.store_link import StoreLink
from common.errors import BrokerUnreachable
from common.redis_address import with_run
from tests.redis_server import RedisServer, make_run
from tests.unit.broker.test_redis_keeper import SAFE, keeper
from tests.unit.broker.test_redis_store import META, RUN, generate, report, tasks


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "server").mkdir()
    started = RedisServer(tmp_path / "server", SAFE)
    yield started
    started.kill()


def test_a_full_redis_still_lets_the_learner_take_and_commit(server: RedisServer) -> None:
    """A commit frees memory; were it refused for want of memory, nothing would ever go on."""
    make_run(server, RUN)
    address = with_run(server.address, RUN.name)
    with RedisClient(address, deadline_s=10) as client, RedisClient(address, deadline_s=0.0) as impatient:
        client.attach(report())
        impatient.attach(report())
        client.offer(tasks(*range(4)))
        generate(client, 4)
        assert client.take(0, 2, 5)
        server.ask("CONFIG", "SET", "maxmemory", 100_000)
        for _ in range(3):  # the first move in a second is let through, whichever it is
            client.status()
            impatient.report(report())
            assert impatient.take(1, 2, 0)
            impatient.filter(1, [2], 0)
        impatient.commit(0)
        with pytest.raises(BrokerUnreachable, match="maxmemory"):
            impatient.offer(tasks(4))
        server.ask("CONFIG", "SET", "maxmemory", 0)
        assert client.status().groups_committed == 2


def test_groups_whose_payloads_are_there_are_accepted_by_a_full_redis(server: RedisServer) -> None:
    """Where some payloads of a round trip found room and others did not, the former must come to a commit."""
    make_run(server, RUN, retain_steps=0)
    address = with_run(server.address, RUN.name)

    async def hand_in(client: RedisClient) -> None:
        async with AsyncRedisClient(address, deadline_s=30) as broker:
            await broker.register(NodeReport("n0", 1, "h", "generating", 0))
            leases = await broker.lease("n0", 100, 4, 5)
            used = int(str(server.ask("INFO", "memory"), "ascii").split("used_memory:")[1].split()[0])  # type: ignore[call-overload]
            server.ask("CONFIG", "SET", "maxmemory", used + 1_600_000)  # not all four groups
            groups = [broker.complete("n0", lease.token, META, bytes(400_000)) for lease in leases]
            handed_in = asyncio.gather(*groups)
            for step in range(2):
                assert await asyncio.to_thread(client.take, step, 2, 20)
                await asyncio.to_thread(client.commit, step)
            assert await handed_in == [True] * 4

    with RedisClient(address, deadline_s=30) as client:
        client.attach(report())
        client.offer(tasks(*range(4)))
        asyncio.run(hand_in(client))
        assert server.ask("KEYS", "*:p:*") == []


def test_a_keeper_goes_on_with_a_run_on_a_full_redis(server: RedisServer, tmp_path: Path) -> None:
    first = keeper(server, tmp_path / "run")
    first.close()
    server.ask("CONFIG", "SET", "maxmemory", 100_000)
    second = keeper(server, tmp_path / "run")
    second.tick()
    assert second.store == first.store
    second.close()


def test_a_group_handed_in_again_after_its_commit_stays_in_the_recording(server: RedisServer) -> None:
    make_run(server, RUN, retain_steps=2)
    address = with_run(server.address, RUN.name)

    async def hand_in_before_and_after(client: RedisClient) -> None:
        async with AsyncRedisClient(address, deadline_s=10) as broker:
            await broker.register(NodeReport("n0", 1, "h", "generating", 0))
            leases = await broker.lease("n0", 100, 2, 5)
            groups = [HandIn("n0", lease.token, META, b"group %d" % lease.task.serial) for lease in leases]
            assert await broker._hand_in(groups) == [1, 1]
            assert client.take(0, 2, 5)
            client.commit(0)
            assert await broker._hand_in(groups) == [1, 1]  # the first answer was lost

    with RedisClient(address, deadline_s=10) as client:
        client.attach(report())
        client.offer(tasks(0, 1))
        asyncio.run(hand_in_before_and_after(client))
    link = StoreLink(endpoint(address, "learner", None), "learner", RUN.name, 10)
    read = [group.payload for group in recorded_steps(link)[0]]
    link.close()
    assert read == [b"group 0", b"group 1"]


def test_a_keeper_outlives_a_redis_that_goes_away_while_a_lost_store_is_replaced(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is started again then finds its way, however often that happened."""
    first = keeper(server, tmp_path / "run")
    lost = first.store
    link = StoreLink(endpoint(first.address, "observer", None), "observer", "kept", 10)
    link.read(lambda moves: [("PING",)])
    server.ask("HSET", link.keys.state, "lost", "for the test")
    link.close()

    def unreachable(store: str) -> None:
        raise BrokerUnreachable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(first._store, "enter", unreachable)
        first.tick()
        first.tick()
    first.close()
    second = keeper(server, tmp_path / "run")
    assert second.store not in ("", lost)
    second.tick()
    second.close()


def set_back(server: RedisServer, link: StoreLink, ms: int) -> None:
    """Everything that the store noted of times is that much older: the server's clock jumped forward."""
    keys = link.keys
    tick = int(str(server.ask("HGET", keys.state, "tick"), "ascii"))  # type: ignore[call-overload]
    server.ask("HSET", keys.state, "tick", tick - ms)
    server.ask("HSET", keys.state, "due", tick - ms)
    for name in ("leases", "seen"):
        for member in server.ask("ZRANGE", keys.of(name), 0, -1):  # type: ignore[attr-defined]
            server.ask("ZINCRBY", keys.of(name), -ms, member)
    flat = server.ask("HGETALL", keys.of("tasks"))
    for serial, packed in zip(flat[::2], flat[1::2], strict=True):  # type: ignore[index]
        *fields, leased_at = msgspec.msgpack.decode(packed)
        server.ask("HSET", keys.of("tasks"), serial, msgspec.msgpack.encode([*fields, leased_at - ms]))


def test_a_clock_that_jumps_far_ahead_takes_no_lease_from_a_node_that_is_alive(server: RedisServer) -> None:
    """Not at once, and not when the node's next heartbeat is held to broker.max_lease_s."""
    make_run(server, RUN)
    address = with_run(server.address, RUN.name)
    node = NodeReport("n0", 1, "h", "generating", 0)

    async def jump(client: RedisClient, link: StoreLink) -> None:
        async with AsyncRedisClient(address, deadline_s=10) as broker:
            await broker.register(node)
            leases = await broker.lease("n0", 100, 2, 5)
            tokens = [lease.token for lease in leases]
            set_back(server, link, 5 * 3_600_000)
            for _ in range(2):
                assert (await broker.heartbeat(node, tokens)).lost == []
                server.ask("HSET", link.keys.state, "due", 0)  # the next move looks for deadlines that have passed
            assert client.status().lease_expiries == 0
            assert await broker.complete("n0", tokens[0], META, b"group")

    with RedisClient(address, deadline_s=10) as client:
        client.attach(report())
        client.offer(tasks(0, 1))
        link = StoreLink(endpoint(address, "observer", None), "observer", RUN.name, 10)
        link.read(lambda moves: [("PING",)])
        asyncio.run(jump(client, link))
        link.close()


def test_serials_that_passed_their_place_on_do_not_pile_up_in_redis(server: RedisServer) -> None:
    keys = Keys(RUN.name, make_run(server, RUN))
    with RedisClient(with_run(server.address, RUN.name), deadline_s=10) as client:
        client.attach(report())
        client.offer(tasks(*range(36)))
        for step in range(12):
            generate(client, 3)
            taken = client.take(step, 2, 5)
            assert taken is not None
            client.filter(step, [taken[0].serial], 1)
            assert client.take(step, 2, 5)
            client.commit(step)
    assert server.ask("ZCARD", keys.of("passed")) == 0
    assert server.ask("HGET", keys.state, "passed_gone") == b"12"
