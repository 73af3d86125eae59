"""Commands that know no more of a job than its broker's address: status, top, ledger, logs, stop."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.client.connect import Access, connect, connect_node
from broker.delivery.learner_rules import LearnerRules
from broker.delivery.node_rules import NodeRules
from broker.server.server import BrokerServer
from common.errors import EXIT_DONE, EXIT_FAILED
from common.process.lock_file import take_lock
from common.process.run_dir import RunDir
from common.security.credentials import KeyFolder
from launch.cli import main
from launch.keys import make
from learner.checkpoint.folder import StreamState, TrainerState
from learner.loop.status_reporter import StatusReporter
from rollout_fleet.node.heartbeat import BrokerTimeout, Heartbeat
from rollout_fleet.node.node_status import NodeStatusTracker
from tests.rigs.brokers import learner_report, new_state, node_report, run_info, serving, tasks
from tests.rigs.configs import job_of, json_of, living_broker, prepared, refusal, run_cli, write_job
from tests.rigs.processes import Command
from tests.rigs.redis_servers import durable_redis, free_port
from tests.rigs.waiting import LIMIT_S, until

Start = Callable[..., Future[int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Runs commands in threads."""
    with ThreadPoolExecutor() as pool:
        yield lambda *words: pool.submit(main, words)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[BrokerServer]:
    """A job with a learner at version 7 and a silent node; its broker's log has 60 lines."""
    config = job_of(tmp_path, broker={"heartbeat_s": 0.1})
    run = prepared(config)
    (run.logs / "broker-0.log").write_text("".join(f"line {i}\n" for i in range(60)))
    with living_broker(config) as server:
        state = server._state
        LearnerRules(state).report(learner_report(step=7))
        NodeRules(state).register(node_report("silent"))
        LearnerRules(state).offer(tasks(3))
        yield server


def test_status_and_ledger_are_those_that_the_run_folder_gives(served, tmp_path, capsys) -> None:
    run = str(tmp_path / "run")
    by_run, by_address = (json_of(capsys, "status", place) for place in (run, served.address))
    assert by_address.keys() == by_run.keys()
    assert by_address["run"] == by_run["run"] == run
    assert json_of(capsys, "ledger", served.address) == json_of(capsys, "ledger", run)
    assert main(["status", served.address]) == EXIT_DONE
    assert f"demo  {run}" in capsys.readouterr().out.replace("\n", ""), "a long path is wrapped"


def test_top_knows_the_step_from_the_learners_report(served, capsys, monkeypatch) -> None:
    def leave(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.observe.status.time.sleep", leave)
    assert main(["top", served.address, "--plain"]) == EXIT_DONE
    assert capsys.readouterr().out.startswith("step 7/5  ")


@pytest.mark.slow
def test_top_ends_with_the_broker(served, start, capsys) -> None:
    """The first look finds a broker, the second one none."""
    top = start("top", served.address, "--plain")
    until(lambda: "step 7/5" in capsys.readouterr().out)
    served.stop()
    assert top.result(LIMIT_S) == EXIT_DONE
    assert "connected" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "top", "ledger", "logs", "stop"])
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["tcp://127.0.0.1"], "ipc://PATH"),
        (["redis://127.0.0.1:6379/0"], "broker.store"),
        (["127.0.0.1:5555"], "tcp://HOST:PORT"),
        (["tcp://127.0.0.1:1", "--credentials", "/no/keys"], "not exist"),
    ],
)
def test_wrong_addresses_and_credentials_are_refused(capsys, command, words, reason) -> None:
    assert reason in refusal(capsys, command, *words)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "ledger", "stop"])
def test_an_address_where_no_broker_is_is_refused(capsys, command) -> None:
    assert "running?" in refusal(capsys, command, f"tcp://127.0.0.1:{free_port()}")


# ---------------------------------------------------------------- logs


def test_without_a_role_the_roles_are_listed_and_the_brokers_log_needs_no_other_process(served, capsys) -> None:
    assert main(["logs", served.address]) == EXIT_DONE
    listed = capsys.readouterr().out.splitlines()
    assert listed == [f"broker: {served.address}", "learner: training on ", "silent: generating on host"]
    assert main(["logs", served.address, "broker"]) == EXIT_DONE
    assert capsys.readouterr().out.splitlines() == [f"line {i}" for i in range(10, 60)]
    assert main(["logs", served.address, "--lines", "1", "broker"]) == EXIT_DONE
    assert capsys.readouterr().out == "line 59\n"
    assert "'brokr'" in (said := refusal(capsys, "logs", served.address, "brokr")) and "nearest: broker" in said
    assert "nearest: silent" in refusal(capsys, "logs", served.address, "silnt")
    assert "nearest: learner" in refusal(capsys, "logs", served.address, "learner-x")
    assert "and 0;" in refusal(capsys, "logs", served.address, "broker", "--lines", "0")


def test_names_that_another_machine_chose_are_shown_and_never_obeyed(served, capsys) -> None:
    hostile = msgspec.structs.replace(node_report("n\x1b[2J"), host="h\x1b[2J\nbroker: here")
    NodeRules(served._state).register(hostile)
    assert main(["logs", served.address]) == EXIT_DONE
    assert capsys.readouterr().out.splitlines()[2] == r"n\x1b[2J: generating on h\x1b[2J\nbroker: here"
    assert main(["stop", served.address, "--timeout-s", "0.5"]) == EXIT_FAILED
    told = capsys.readouterr()
    assert r"n\x1b[2J" in told.out and "\x1b" not in told.out + told.err


def test_a_role_that_does_not_answer_is_not_waited_for_for_long(served, capsys, monkeypatch) -> None:
    monkeypatch.setattr("launch.observe.logs.PATIENCE_S", 0.1)
    assert main(["logs", served.address, "silent"]) == EXIT_FAILED
    assert "silent" in (said := capsys.readouterr().err) and "0.2 s" in said


@pytest.mark.slow
def test_nodes_and_the_learner_send_the_ends_of_their_logs(served, tmp_path, capsys) -> None:
    logs = tmp_path / "far away"
    logs.mkdir()
    for name in ("rollout-n1", "learner-0", "learner-1"):
        (logs / f"{name}.log").write_text(f"the end of {name}\n")
    access = Access(address=served.address, role="learner")
    reporter = StatusReporter(lambda: connect(access), logs)
    reporter.take_over(2, TrainerState(policy_version=7, incarnation=1, tasks=StreamState()))
    reporter.start()
    status = NodeStatusTracker("n1")
    node = Heartbeat(lambda: connect_node(access), status, BrokerTimeout(LIMIT_S, ""), 0.1, logs / "rollout-n1.log")

    async def ask() -> None:
        node.start(lambda reply: None, lambda error: None)
        await asyncio.to_thread(until, lambda: "n1" in served._state.fleet.nodes)
        for role, name in (("n1", "rollout-n1"), ("learner", "learner-0"), ("learner-1", "learner-1")):
            assert await asyncio.to_thread(main, ["logs", served.address, role]) == EXIT_DONE
            assert capsys.readouterr().out == f"the end of {name}\n"
        assert await asyncio.to_thread(main, ["logs", served.address, "learner-9"]) == EXIT_FAILED
        assert "learner-9" in (said := capsys.readouterr().err) and "empty" in said
        await node.stop()

    asyncio.run(ask())
    reporter.stop()


def test_the_logs_of_a_job_that_has_ended_are_read_from_its_files(run: RunDir, capsys) -> None:
    assert main(["logs", str(run.path)]) == EXIT_FAILED
    assert str(run.logs) in capsys.readouterr().err
    named = {"broker": "broker-0", "eval": "eval-0", "learner": "learner-0", "learner-1": "learner-1"}
    named |= {"node-0": "rollout-node-0", "far": "rollout-far"}
    for name in named.values():
        (run.logs / f"{name}.log").write_text(f"first\nthe\u3000end of {name}\x1b[2J\n")
    assert main(["logs", str(run.path)]) == EXIT_DONE
    assert set(capsys.readouterr().out.splitlines()) == {
        f"{name}: {run.logs / stem}.log" for name, stem in named.items()
    }
    for role, name in {**named, "learner-0": "learner-0"}.items():
        assert main(["logs", str(run.path), role, "--lines", "1"]) == EXIT_DONE
        assert capsys.readouterr().out == f"the\u3000end of {name}?[2J\n"
    assert "nearest: node-0" in refusal(capsys, "logs", str(run.path), "node-1")
    assert "and 0;" in refusal(capsys, "logs", str(run.path), "broker", "--lines", "0")


# ---------------------------------------------------------------- stop


def leaving(server: BrokerServer, node: str) -> None:
    """Wait until the node is told to stop, then leave."""

    async def serve() -> None:
        async with connect_node(Access(address=server.address, role="node")) as client:
            while not (await client.heartbeat(node_report(node), [])).stop:
                await asyncio.sleep(0.01)
            await client.leave(node)

    asyncio.run(serve())


@pytest.mark.slow
def test_two_stops_at_once_wait_until_everybody_has_left_and_the_broker_has_ended(served, start, capsys) -> None:
    stops = [start("stop", served.address) for _ in range(2)]
    until(lambda: served._state.stopping)
    LearnerRules(served._state).report(learner_report("drained", step=7))
    leaving(served, "silent")
    assert [stop.result(LIMIT_S) for stop in stops] == [EXIT_DONE] * 2
    said = capsys.readouterr().out.splitlines()
    assert said.count("stopped; the same commands continue the job") == 2
    assert "waiting for learner, silent" in said and "waiting for the broker" in said


@pytest.mark.slow
def test_a_broker_that_is_lost_while_the_job_stops_and_comes_back_is_told_again(tmp_path, start) -> None:
    address = f"ipc://{tmp_path}/broker"
    first, second = (new_state(run_info(config=msgspec.json.encode(job_of(tmp_path)))) for _ in range(2))
    for state in (first, second):
        NodeRules(state).register(node_report())
    with serving(address, first):
        stop = start("stop", address)
        until(lambda: first.stopping)
    with serving(address, second):
        until(lambda: second.stopping)
        NodeRules(second).leave("n0")
        assert stop.result(LIMIT_S) == EXIT_DONE


def test_those_who_do_not_leave_are_named(served, capsys) -> None:
    assert main(["stop", served.address, "--timeout-s", "0.5"]) == EXIT_FAILED
    assert "still there after 0.5 s: learner, silent" in capsys.readouterr().err


def test_with_no_broker_in_the_run_folder_there_is_nothing_to_stop_unless_up_is_about_to_start_it(run, capsys) -> None:
    assert main(["stop", str(run.path)]) == EXIT_DONE
    assert "nothing to stop: no broker has run here yet" in capsys.readouterr().out
    with take_lock(run.path / "up.lock"):
        assert main(["stop", str(run.path), "--timeout-s", "0.5"]) == EXIT_FAILED
    assert "still there after 0.5 s: the broker" in capsys.readouterr().err


@pytest.mark.slow
def test_only_the_learners_key_may_stop_a_job(tmp_path, capsys) -> None:
    keys = KeyFolder(tmp_path / "keys")
    make(keys, ["a"])
    config = job_of(tmp_path, broker={"credentials": str(keys.path)})
    prepared(config)
    with living_broker(config, str(keys.path)) as server:
        words: list[Any] = ["stop", server.address, "--timeout-s", "3"]
        said = refusal(capsys, *words, "--credentials", str(keys.observer))
        assert "an observer" in said
        assert "--credentials DIR" in refusal(capsys, *words)
        assert not server._state.stopping
        assert main(["status", server.address, "--credentials", str(keys.observer)]) == EXIT_DONE
        assert main(["stop", str(tmp_path / "run"), "--credentials", str(keys.learner)]) == EXIT_DONE
        assert server._state.stopping


@pytest.mark.slow
@pytest.mark.parametrize("by", ["address", "run folder"])
def test_standby_brokers_are_stopped_one_after_the_other(tmp_path, by: str) -> None:
    redis = durable_redis(tmp_path / "redis")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    job = write_job(tmp_path, broker={"store": "redis", "redis": redis.address, "address": addresses})
    with Command(tmp_path, "one", "broker", str(job)) as one, Command(tmp_path, "two", "broker", str(job)) as two:
        until((tmp_path / "run" / "broker.json").exists)
        until(lambda: "standing by" in one.output() + two.output(), told=lambda: one.output() + two.output())
        stop = run_cli("stop", ",".join(addresses) if by == "address" else str(tmp_path / "run"))
        assert (stop.returncode, one.wait(), two.wait()) == (EXIT_DONE,) * 3, stop.stderr + one.output() + two.output()
    redis.stop()
