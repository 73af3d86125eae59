"""What Redis may do to a run: forget, fall back, restart, be asked twice; and what is kept of committed steps."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.contract import LearnerReport, Lease, NodeReport, RunInfo
from broker.redis.async_client import AsyncRedisClient
from broker.redis.async_link import AsyncLink
from broker.redis.client import RedisClient
from broker.redis.endpoint import endpoint, redis_module
from broker.redis.keys import Keys, pointer_key, run_prefix
from broker.redis.link import Link
from broker.redis.moves import Moves, StoreGone
from broker.redis.recording import recorded_steps
from broker.redis.store_link import StoreLink
from common.errors import BrokerError, BrokerUnreachable, UsageError
from common.redis_address import with_run
from common.rollouts import GroupMeta, Task
from tests.redis_server import RedisServer, free_port, make_run

META = GroupMeta(0, 0, 0.5, 10, 0, 1.0)
RUN = RunInfo("a run", "/nowhere", 2, 3, 2, 30.0, 1 << 30)
AOF = {"appendonly": "yes", "appendfsync": "always"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path, AOF)
    yield started
    started.kill()


@pytest.fixture
def learner(server: RedisServer) -> Iterator[RedisClient]:
    make_run(server, RUN, retain_steps=2)
    with RedisClient(with_run(server.address, RUN.name), deadline_s=10) as client:
        yield client


def report(incarnation: int = 1) -> LearnerReport:
    return LearnerReport(1, incarnation, "training", 0)


def tasks(*serials: int) -> list[Task]:
    return [Task(s, b"{}", s, 2) for s in serials]


def generate(client: RedisClient, count: int) -> list[Lease]:
    """`count` groups leased and handed in by a node."""

    async def node() -> list[Lease]:
        async with AsyncRedisClient(client.address, deadline_s=10) as broker:
            await broker.register(NodeReport("n0", 1, "h", "generating", 0))
            leases = await broker.lease("n0", 100, count, 5)
            done = [broker.complete("n0", le.token, META, b"group %d" % le.task.serial) for le in leases]
            assert all(await asyncio.gather(*done))
            return leases

    return asyncio.run(node())


def copy_of_aof(server: RedisServer) -> dict[Path, bytes]:
    found = [*server.folder.glob("appendonly.aof"), *server.folder.glob("appendonlydir/*")]
    return {path: path.read_bytes() for path in found}


def fall_back(server: RedisServer, to: dict[Path, bytes]) -> None:
    """The server comes back with what it had earlier, as a replica that lagged would be."""
    server.kill()
    for path, data in to.items():
        path.write_bytes(data)
    server.start()


# ---------------------------------------------------------------- losing what was acknowledged


def test_a_learner_notices_that_moves_of_its_own_were_lost_and_nothing_is_taken_twice(
    server: RedisServer, learner: RedisClient
) -> None:
    learner.attach(report())
    learner.offer(tasks(*range(6)))
    generate(learner, 6)
    earlier = copy_of_aof(server)
    taken = learner.take(0, 2, 1.0)
    assert taken is not None and [g.serial for g in taken] == [0, 1]
    fall_back(server, earlier)
    with pytest.raises(StoreGone, match=r"has lost moves of run a run .* epoch 1 where 2 was acknowledged"):
        learner.take(1, 2, 1.0)
    with (
        RedisClient(learner.address, deadline_s=1) as other,
        pytest.raises(StoreGone, match="has lost moves"),  # nobody may go on with such a store
    ):
        other.attach(report(2))
    make_run(server, RUN)  # as its keeper does
    with pytest.raises(StoreGone, match="attach again"):
        learner.take(1, 2, 1.0)
    again = learner.attach(report(2))
    assert (again.next_serial, again.committed_step) == (0, -1)


def test_lost_moves_of_nodes_are_made_good_without_a_new_store(server: RedisServer, learner: RedisClient) -> None:
    store = learner.attach(report()).store_id
    learner.offer(tasks(0, 1))
    earlier = copy_of_aof(server)
    generate(learner, 2)
    fall_back(server, earlier)
    assert learner.take(0, 2, 0.0) is None
    generate(learner, 2)
    taken = learner.take(0, 2, 1.0)
    assert taken is not None and [g.payload for g in taken] == [b"group 0", b"group 1"]
    assert learner.attach(report()).store_id == store


def test_a_server_that_was_flushed_is_noticed(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    server.ask("FLUSHALL")
    with pytest.raises(StoreGone, match="no longer has the store"):
        learner.offer(tasks(0))


def test_an_evicted_payload_is_said_and_not_passed_over(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    learner.offer(tasks(0, 1))
    generate(learner, 2)
    for key in server.ask("KEYS", "*:p:0.*"):  # type: ignore[attr-defined]
        server.ask("DEL", key)
    with pytest.raises(BrokerError, match=r"no longer has the payload of task 0; .* noeviction"):
        learner.take(0, 2, 1.0)


# ---------------------------------------------------------------- restarts and repetitions


def test_calls_wait_for_a_server_that_is_restarted(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    learner.offer(tasks(0, 1))
    generate(learner, 2)
    server.kill()
    later = threading.Timer(0.5, server.start)
    later.start()
    taken = learner.take(0, 2, 1.0)
    later.join()
    assert taken is not None and [g.payload for g in taken] == [b"group 0", b"group 1"]


def test_a_server_that_forgot_the_script_gets_it_again(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    server.ask("SCRIPT", "FLUSH")
    assert learner.offer(tasks(0)) == 1


def test_a_server_that_forgot_the_script_answers_also_at_the_deadline(
    server: RedisServer, learner: RedisClient
) -> None:
    state = Moves(RUN.name, store_name(server))
    server.ask("SCRIPT", "FLUSH")
    link = Link(endpoint(server.address, "learner", None), "learner", 10)
    over = time.monotonic() - 1  # as for the last attempt of a call that waited for a server
    [reply] = link.run(lambda repeated, whole: [state.command("sweep", whole=whole)], over)
    assert state.answer(reply) == []
    link.close()

    async def node() -> None:
        server.ask("SCRIPT", "FLUSH")
        waiting = AsyncLink(endpoint(server.address, "node", None), "node", 10)
        try:
            [again] = await waiting.run(lambda repeated, whole: [state.command("sweep", whole=whole)], over)
            assert state.answer(again) == []
        finally:
            await waiting.close()

    asyncio.run(node())


def store_name(server: RedisServer) -> str:
    pointer = server.ask("GET", pointer_key(RUN.name))
    assert isinstance(pointer, bytes)
    return msgspec.json.decode(pointer)["store"]


def test_no_answer_within_the_deadline_says_where_and_why() -> None:
    address = f"redis://127.0.0.1:{free_port()}/0?run=x"
    with RedisClient(address, deadline_s=0.3) as client, pytest.raises(BrokerUnreachable, match=r"(?i)refused"):
        client.status()


def test_a_run_that_is_not_there_yet_is_waited_for_and_then_named(server: RedisServer) -> None:
    with (
        RedisClient(with_run(server.address, "later"), deadline_s=0.3) as client,
        pytest.raises(BrokerUnreachable, match="no run later is on the Redis server"),
    ):
        client.status()


def test_without_a_name_the_only_run_is_meant_and_several_are_named(server: RedisServer, learner: RedisClient) -> None:
    with RedisClient(server.address, deadline_s=5) as client:
        assert client.status().run.name == RUN.name
    make_run(server, RunInfo("another", "/b", 1, 1, 1, 1.0, 1))
    with RedisClient(server.address, deadline_s=5) as client, pytest.raises(UsageError, match="runs a run, another"):
        client.status()


def moves(server: RedisServer, store: str) -> Any:
    """A function that makes one move, as it is told to: a client's repetition."""
    link, state = Link(endpoint(server.address, "learner", None), "learner", 10), Moves(RUN.name, store)

    def move(name: str, *arguments: Any) -> list[Any]:
        return state.answer(link.run(lambda _, whole: [state.command(name, *arguments, whole=whole)], 0)[0])

    return move


def test_a_repeated_lease_gives_the_leases_of_the_first_time(server: RedisServer, learner: RedisClient) -> None:
    move = moves(server, learner.attach(report()).store_id)
    learner.offer(tasks(*range(4)))
    move("register", b'{"node_id":"n"}', "n", 1, "h", 0)
    first = move("lease", "n", 0, 2, "ab12", 0, 0)
    assert move("lease", "n", 0, 2, "ab12", 1, 0) == first
    assert move("lease", "n", 0, 2, "cd34", 1, 0)[2] != first[2], "another request gets other leases"


def test_a_repeated_offer_counts_as_the_first_time(server: RedisServer, learner: RedisClient) -> None:
    move = moves(server, learner.attach(report()).store_id)
    assert move("offer", "", "", "ab", 0, 0, b"x", 1, b"y") == [2]
    assert move("offer", "", "", "ab", 1, 0, b"x", 1, b"y") == [2]
    assert move("offer", "", "", "cd", 0, 0, b"x", 1, b"y", 2, b"z") == [1]


def test_a_cancelled_lease_is_handed_back(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())

    async def scenario() -> None:
        async with AsyncRedisClient(learner.address, deadline_s=10) as node:
            await node.register(NodeReport("n0", 1, "h", "generating", 0))
            waiting = asyncio.create_task(node.lease("n0", 0, 1, 30))
            await asyncio.sleep(0.2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await asyncio.to_thread(learner.offer, tasks(0))
            assert [le.task.serial for le in await node.lease("n0", 0, 1, 5)] == [0]

    asyncio.run(scenario())


def test_a_group_is_accepted_with_its_payload_only_and_with_one_payload_only(
    server: RedisServer, learner: RedisClient
) -> None:
    move = moves(server, store := learner.attach(report()).store_id)
    learner.offer(tasks(0))
    move("register", b'{"node_id":"n"}', "n", 1, "h", 0)
    token = move("lease", "n", 0, 1, "ab12", 0, 0)[2]
    group = (token, "77", b'{"version_min":0,"version_max":0,"reward_mean":1,"sampled_tokens":1}', 1, 4)
    assert move("complete", "n", *group) == [-1]
    key = Keys(RUN.name, store).payload(token + b":77")
    server.ask("SET", key, b"data")
    assert move("complete", "n", *group) == [1]
    assert move("complete", "n", *group) == [1]
    assert server.ask("GET", key) == b"data"
    assert move("complete", "n", token, "88", *group[2:]) == [1], "repeated under another nonce"
    server.ask("SET", Keys(RUN.name, store).payload(b"0.gone:99"), b"data")
    assert move("complete", "n", b"0.gone", "99", *group[2:]) == [0]
    assert server.ask("KEYS", "*:p:*") == [key], "what is refused is dropped"


def test_waiting_asks_seldom(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    before = commands(server)
    assert learner.take(0, 2, 2.0) is None
    assert commands(server) - before < 60, "a wait of two seconds is a handful of moves"


def commands(server: RedisServer) -> int:
    lines = server.ask("INFO", "stats").decode().splitlines()  # type: ignore[attr-defined]
    return int(dict(line.split(":") for line in lines if ":" in line)["total_commands_processed"])


def test_a_take_is_woken_by_the_last_group_that_it_needs(server: RedisServer, learner: RedisClient) -> None:
    learner.attach(report())
    learner.offer(tasks(0, 1))
    later = threading.Timer(0.3, generate, (learner, 2))
    later.start()
    started = time.monotonic()
    assert learner.take(0, 2, 20.0) is not None
    assert time.monotonic() - started < 10
    later.join()


# ---------------------------------------------------------------- what is kept


def test_committed_groups_are_kept_for_replay_and_dropped_step_by_step(
    server: RedisServer, learner: RedisClient
) -> None:
    learner.attach(report())
    learner.offer(tasks(*range(8)))
    generate(learner, 8)
    for step in range(4):
        assert learner.take(step, 2, 1.0) is not None
    learner.filter(3, [6], 0)
    learner.commit(2)  # two steps are retained, and step 3 is not committed
    link = StoreLink(endpoint(learner.address, "learner", None), "learner", RUN.name, 10)
    found = recorded_steps(link)
    steps = found.groups
    assert (found.store_id, found.next_serial, found.committed_step, found.places) == (link.store, 8, 2, {3: 2})
    assert {step: [g.task.serial for g in groups] for step, groups in steps.items()} == {
        1: [2, 3],
        2: [4, 5],
        3: [6, 7],
    }
    assert [g.payload for g in found[1] + found[3]] == [b"group 2", b"group 3", b"group 6", b"group 7"]
    assert [(g.node_id, g.meta, g.filtered) for g in steps[3]] == [("n0", META, True), ("n0", META, False)]
    assert len(server.ask("KEYS", "*:p:*")) == 6  # type: ignore[arg-type]
    learner.commit(3)
    with pytest.raises(BrokerError, match="no longer in Redis"):
        found[1]
    assert sorted(recorded_steps(link)) == [2, 3]
    link.close()


def test_a_mean_reward_that_is_no_number_reaches_the_learner_and_the_ledger(learner: RedisClient) -> None:
    learner.attach(report())
    learner.offer(tasks(0))

    async def node() -> None:
        async with AsyncRedisClient(learner.address, deadline_s=10) as broker:
            await broker.register(NodeReport("n0", 1, "h", "generating", 0))
            [lease] = await broker.lease("n0", 0, 1, 5)
            assert await broker.complete("n0", lease.token, GroupMeta(0, 0, float("nan"), 1), b"x")

    asyncio.run(node())
    taken = learner.take(0, 1, 1.0)
    assert taken is not None
    assert taken[0].meta.reward_mean != taken[0].meta.reward_mean
    learner.commit(0)
    assert learner.ledger()[0].reward_mean is None


def test_all_keys_of_a_run_have_its_prefix_and_other_runs_are_never_touched(
    server: RedisServer, learner: RedisClient
) -> None:
    server.ask("SET", "somebody else's", "value")
    learner.attach(report())
    learner.offer(tasks(*range(4)))
    generate(learner, 4)
    learner.take(0, 2, 1.0)
    learner.commit(0)
    names = set(server.ask("KEYS", "*"))  # type: ignore[call-overload]
    prefix = run_prefix(RUN.name).encode()
    assert {n for n in names if not n.startswith(prefix)} == {b"somebody else's", b"slipstream:runs"}
    assert pointer_key(RUN.name) in names


def test_without_redis_py_the_error_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"needs redis-py, which is not .* pip install 'slipstream-rl\[redis\]'"):
        redis_module("redis.is_not_installed_here")


def test_a_package_that_redis_py_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "redis_like.py").write_text("import async_timeout_of_old_pythons")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="and that async_timeout_of_old_pythons, which is not installed"):
        redis_module("redis_like")


def test_names_are_encoded_so_that_no_pattern_matches_more_than_its_run() -> None:
    assert run_prefix("a*b?[c]{d} é") == "slipstream:{a%2Ab%3F%5Bc%5D%7Bd%7D%20%C3%A9}:"
