"""The health endpoint: what probes are told while a role starts, works, is away, and has stopped turning."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from broker.delivery.learner_rules import LearnerRules
from broker.main import BrokerSigns
from common.errors import EXIT_USAGE, UsageError
from common.process.health import LATE_S, MOST_CLIENTS, LifeSigns, Series, TextServer, serving_health
from tests.rigs.brokers import learner_report, new_state, serving
from tests.rigs.configs import write_job
from tests.rigs.waiting import LIMIT_S, Clock, until


@contextlib.contextmanager
def served(signs: LifeSigns) -> Iterator[int]:
    with TextServer("", 0, signs.answer) as server:
        server.daemon_threads = False  # closing the server waits for what they print
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(LIMIT_S)


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_probes_see_a_role_start_work_go_away_and_stand_still() -> None:
    clock = Clock(100.0)
    signs = LifeSigns(clock=clock)
    with served(signs) as port:

        def probed() -> tuple[int, int]:
            return get(port, "/healthz")[0], get(port, "/readyz")[0]

        clock.now += 10 * LATE_S  # an engine may take long to build
        assert probed() == (200, 503)
        signs.show("generating", True)
        assert probed() == (200, 200)
        signs.show("draining", False)
        assert probed() == (200, 503)
        signs.show("generating", True)
        clock.now += LATE_S + 1
        assert probed() == (503, 503)
        status, text = get(port, "/healthz")
        told = {"state": "generating", "alive": False, "ready": True, "silent_s": LATE_S + 1}
        assert (status, msgspec.json.decode(text)) == (503, told)
        assert get(port, "/else")[0] == 404


def test_clients_that_say_nothing_or_leave_keep_no_other_waiting(capfd: pytest.CaptureFixture) -> None:
    with served(LifeSigns()) as port, contextlib.ExitStack() as at_end:
        for said in (b"", b"GET /healthz HTTP/1.0\r\n", b"\x00" * 1000):
            for _ in range(2):
                silent = at_end.enter_context(socket.create_connection(("127.0.0.1", port)))
                silent.sendall(said)
                assert get(port, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_many_slow_clients_take_few_threads_and_keep_no_probe_waiting() -> None:
    before = threading.active_count()
    with served(LifeSigns()) as port, contextlib.ExitStack() as at_end:
        for _ in range(3 * MOST_CLIENTS):
            slow = at_end.enter_context(socket.create_connection(("127.0.0.1", port)))
            slow.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        assert get(port, "/healthz")[0] == 200
        until(lambda: threading.active_count() - before <= 1 + MOST_CLIENTS)


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.process.health.REQUEST_S", 0.3)
    with served(LifeSigns()) as port, socket.create_connection(("127.0.0.1", port)) as slow:
        slow.setblocking(False)

        def cut() -> bool:
            try:
                slow.send(b"a")
                return slow.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        until(cut, "the end of a request that goes on for ever", every_s=0.05)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_probe_may_come_over_ipv6() -> None:
    with served(LifeSigns()) as port:
        assert get(port, "/healthz", "::1")[0] == get(port, "/healthz")[0] == 200


def test_port_0_serves_nothing_and_a_taken_port_is_a_usage_error() -> None:
    with serving_health(0, LifeSigns(), None), served(LifeSigns()) as port:
        with pytest.raises(UsageError) as refused, serving_health(port, LifeSigns(), "keys"):
            pass
        assert "telemetry.health_port" in str(refused.value) and str(port) in str(refused.value)
    with serving_health(port, LifeSigns(), "keys"):
        assert get(port, "/healthz")[0] == 200
    with pytest.raises(ConnectionError):
        get(port, "/healthz")


def test_without_credentials_a_role_answers_on_the_loopback_interface_alone() -> None:
    for credentials, reached in ((None, False), ("keys", True)):
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        with serving_health(port, LifeSigns(), credentials):
            assert get(port, "/healthz")[0] == 200
            with contextlib.suppress(ConnectionError):  # Linux has all of 127.0.0.0/8, and one address is served
                assert (get(port, "/healthz", "127.0.0.2")[0] == 200) is reached
                continue
        assert not reached


def test_series_have_a_type_and_labels_that_no_word_breaks() -> None:
    series = Series(run='a"b')
    series.add("nodes", 3, host="c\\d\ne")
    series.add("events_total", 1.5, kind="join")
    series.add("nodes", 4)
    assert series.text().splitlines() == [
        "# TYPE slipstream_nodes gauge",
        r'slipstream_nodes{run="a\"b",host="c\\d\ne"} 3.0',
        r'slipstream_nodes{run="a\"b"} 4.0',
        "# TYPE slipstream_events_total counter",
        r'slipstream_events_total{run="a\"b",kind="join"} 1.5',
    ]


@pytest.mark.slow
def test_a_broker_whose_loop_stands_still_is_not_alive() -> None:
    signs, stopped, goes_on = LifeSigns(late_s=1.5), threading.Event(), threading.Event()

    def tick() -> None:
        signs.show("leading", True)
        if stopped.is_set():
            goes_on.wait(LIMIT_S)

    with served(signs) as port, serving(on_tick=tick):
        until(lambda: get(port, "/readyz")[0] == 200)
        stopped.set()
        until(lambda: get(port, "/healthz")[0] == 503)
        goes_on.set()
        until(lambda: get(port, "/healthz")[0] == 200)


@pytest.mark.slow
def test_a_broker_process_answers_probes_and_another_one_may_not_have_its_port(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "launch.cli", "broker", str(write_job(tmp_path)), f"telemetry.health_port={port}"]

    def probed(path: str) -> tuple[int, str]:
        try:
            return get(port, path)
        except OSError:
            return 0, ""

    with subprocess.Popen(command) as broker:
        until(lambda: probed("/readyz")[0] == 200, check=lambda: broker.poll() is None or pytest.fail("it has ended"))
        until(lambda: "slipstream_nodes_ready 0.0\n" in probed("/metrics")[1])
        other = [*command, f"run.dir={tmp_path / 'other'}"]
        refused = subprocess.run(other, capture_output=True, text=True, timeout=LIMIT_S)
        assert refused.returncode == EXIT_USAGE
        assert "telemetry.health_port" in refused.stderr and str(port) in refused.stderr
        broker.send_signal(signal.SIGTERM)
        assert broker.wait(LIMIT_S) == 0
    assert probed("/healthz")[0] == 0


def test_the_broker_counts_the_seconds_in_which_the_learner_waits() -> None:
    clock = Clock(100.0)
    signs, state = BrokerSigns(clock), new_state(clock=clock)

    def after(seconds: float, learner: str) -> dict[str, float]:
        LearnerRules(state).report(learner_report(learner))
        clock.now += seconds
        signs.tick(state.status)
        lines = signs.answer("/metrics")[1].splitlines()
        return {words[0]: float(words[1]) for words in map(str.split, lines) if words[0] != "#"}

    assert after(2.0, "waiting")["slipstream_learner_waiting_seconds_total"] == 2.0
    assert after(5.0, "training")["slipstream_learner_waiting_seconds_total"] == 2.0
    assert after(0.5, "waiting")["slipstream_learner_waiting_seconds_total"] == 2.0, "it looks once a second"
    found = after(3.0, "waiting")
    assert (found["slipstream_learner_waiting_seconds_total"], found["slipstream_nodes_ready"]) == (5.5, 0.0)
    assert signs.answer("/readyz")[0] == 200
    signs.show("standing by", False)
    assert (signs.answer("/healthz")[0], signs.answer("/readyz")[0]) == (200, 503)
