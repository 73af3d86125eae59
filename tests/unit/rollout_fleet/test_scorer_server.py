"""The role that serves a scorer: its command, its variables, and how it starts, drains and ends. vLLM is replaced."""

import asyncio
import logging
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from common.config.scorers import ScorerConfig
from common.errors import ConfigError, SlipstreamError
from common.process.lifecycle import DrainFlag
from launch.cli import main
from rollout_fleet.scorers import server
from rollout_fleet.scorers.reports import Reports
from rollout_fleet.scorers.vllm_server import KeyGuard
from tests.rigs.configs import converted_folder, refusal, write_job
from tests.rigs.refusals import refused
from tests.rigs.waiting import until

HEALTHY = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def scorer(url: str = "http://127.0.0.1:8001/v1", **keys: Any) -> ScorerConfig:
    return ScorerConfig(url=url, model="org/judge", prompt="{completion}", verdict="(.*)", **keys)


def alone(folder: Path) -> Reports:
    """The reports of a scorer without a broker."""
    return Reports("judge", "", folder / "scorer.log", str)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_another_service_on_the_port_is_no_healthy_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert not server._healthy(*other.getsockname())
        thread.join()


def test_vllm_gets_the_address_the_name_and_the_options() -> None:
    config = scorer(serve={"model": "/models/judge", "max_model_len": 64, "enforce_eager": False})
    words = server.command(config, "127.0.0.1", 8001, cpu=False)
    expected = "--model /models/judge --served-model-name org/judge --host 127.0.0.1 --port 8001 --shutdown-timeout 30"
    assert " ".join(words[4:]) == f"{expected} --max-model-len 64 --no-enforce-eager"
    on_cpu = server.command(scorer(kind="classification"), "127.0.0.1", 8001, cpu=True)
    assert on_cpu[5] == "org/judge"
    assert " ".join(on_cpu[-5:]) == "--runner pooling --enforce-eager --kv-cache-memory-bytes 1073741824"


def test_the_key_goes_through_the_environment_and_no_command_line() -> None:
    config = scorer(api_key_env="JUDGE_KEY")
    assert server.environment(config, {"JUDGE_KEY": "sk-secret", "PATH": "/bin"})["VLLM_API_KEY"] == "sk-secret"
    assert "sk-secret" not in " ".join(server.command(config, "127.0.0.1", 1, cpu=True))
    assert "VLLM_API_KEY" not in server.environment(scorer(), {})


def answered(scope: dict[str, Any], *headers: tuple[bytes, bytes]) -> list[dict[str, Any]]:
    """The guard's answer to a request; "passed" when the server gets it."""
    sent: list[dict[str, Any]] = []

    async def app(*_: Any) -> None:
        sent.append({"type": "passed"})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(KeyGuard(app)({"headers": headers, **scope}, None, send))
    return sent


PATHS = ["/classify", "/pooling", "/score", "/tokenize", "/invocations", "/metrics", "/v1/models", "/health/", "/ping"]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", PATHS)
def test_every_path_but_the_health_check_asks_for_the_key(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    request = {"type": "http", "method": method, "path": path}
    for headers in ([], [(b"authorization", b"Bearer sk-other")], [(b"authorization", b"sk-secret")]):
        assert answered(request, *headers)[0]["status"] == 401
    assert answered(request, (b"authorization", b"bearer sk-secret")) == [{"type": "passed"}]


def test_health_and_the_start_need_no_key_and_a_websocket_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    passed = [{"type": "passed"}]
    assert answered({"type": "http", "method": "GET", "path": "/health"}) == passed
    assert answered({"type": "http", "method": "POST", "path": "/health"})[0]["status"] == 401
    assert answered({"type": "lifespan"}) == passed
    socket = {"type": "websocket", "path": "/health"}
    assert answered(socket) == [{"type": "websocket.close", "code": 1008}]
    assert answered(socket, (b"authorization", b"Bearer sk-secret")) == passed


def test_vllm_gets_the_guard_behind_other_middleware_when_there_is_a_key() -> None:
    config = scorer(api_key_env="JUDGE_KEY", serve={"middleware": "mine.Outer"})
    words = server.command(config, "127.0.0.1", 1, cpu=False)
    assert words[-4:] == ["--middleware", "mine.Outer", "--middleware", "rollout_fleet.scorers.vllm_server.KeyGuard"]
    assert "--middleware" not in server.command(scorer(), "127.0.0.1", 1, cpu=True)


def test_a_scorers_sockets_lie_where_their_paths_are_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/".ljust(71, "x"))
    assert server.environment(scorer(), {})["TMPDIR"] == "/tmp"


@pytest.mark.parametrize("url", ["https://127.0.0.1:8001/v1", "http://127.0.0.1/v1", "http://127.0.0.1:8001/api"])
def test_an_address_that_vllm_cannot_take_is_refused(url: str) -> None:
    with refused(ConfigError, "job.yaml", "scorers.judge.url", url):
        server.address_of("judge", scorer(url), "job.yaml")


def test_a_folder_with_weights_for_the_learner_alone_is_refused(tmp_path: Path) -> None:
    folder = converted_folder(tmp_path / "converted")
    config = scorer(serve={"model": str(folder)})
    with refused(ConfigError, "job.yaml", "scorers.judge.model", folder, "slipstream convert"):
        server.serve("judge", config, file="job.yaml", log=tmp_path / "log", reports=alone(tmp_path))


def test_beyond_loopback_a_key_is_needed() -> None:
    with refused(ConfigError, "job.yaml", "scorers.judge.api_key_env"):
        server.address_of("judge", scorer("http://10.0.0.1:8001/v1"), "job.yaml")
    config = scorer("http://10.0.0.1:8001/v1", api_key_env="KEY")
    assert server.address_of("judge", config, "job.yaml") == ("10.0.0.1", 8001)


def test_it_says_when_it_is_up_and_lets_vllm_end_by_itself(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flag = DrainFlag()
    monkeypatch.setattr(DrainFlag, "install", classmethod(lambda *_: flag))
    monkeypatch.setattr(server, "command", lambda *_, **__: [sys.executable, "-c", HEALTHY, str(port)])
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    caplog.set_level(logging.INFO)
    config = scorer(f"http://127.0.0.1:{port}/v1")

    def stop() -> None:
        until(lambda: f"at {config.url}" in caplog.text)
        flag.set("SIGTERM")

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert server.serve("judge", config, file="job.yaml", log=tmp_path / "vllm.log", reports=alone(tmp_path)) == 0
    stopping.join()
    assert (tmp_path / "vllm.log").read_text() == "drained\n"
    assert "SIGTERM" in caplog.text


def test_a_vllm_that_ends_fails_the_role_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrainFlag, "install", classmethod(lambda *_: DrainFlag()))
    monkeypatch.setattr(server, "command", lambda *_, **__: [sys.executable, "-c", "print('no memory'); exit(3)"])
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    with refused(SlipstreamError, "exit code 3", "no memory"):
        server.serve("judge", scorer(), file="job.yaml", log=tmp_path / "vllm.log", reports=alone(tmp_path))


def test_the_command_refuses_a_name_or_a_key_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "prompt": "{completion}", "verdict": "(.*)"}
    reward = {"environment": None, "reward": [{"scorer": "judge"}]}
    job = write_job(tmp_path, tasks=reward, scorers={"judge": {**judge, "api_key_env": "SOME_JUDGES_KEY"}})
    monkeypatch.delenv("SOME_JUDGES_KEY", raising=False)
    assert "'judge'" in refusal(capsys, "scorer", str(job), "jugde")
    err = refusal(capsys, "scorer", str(job), "judge")
    assert "SOME_JUDGES_KEY" in err
    assert "scorers.judge.api_key_env" in err
    assert main(["scorer", str(job), "judge", "scorers.judge.url=3"]) == 2
