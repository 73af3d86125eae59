"""The server of the page: who may read, what it answers, and what it makes of odd files. Nothing is ever written."""

import asyncio
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from broker.contract import Delivery, LearnerReport
from common.errors import SlipstreamError
from common.metrics import EvaluationMetrics, StepMetrics
from common.process.run_dir import RunDir, write_json
from common.run_reader import MetricsTail
from common.spans import Span, SpanBatch
from common.transcripts import Transcript, Turn
from launch.cli import main
from launch.observe.curves import BUCKETS, Curves
from launch.resolve_target import config_of
from launch.web.app import TOKENS, Hub, bounded, make_app, preview
from launch.web.run_view import PIECES, BrowserCopy, Lanes, RunView, _stall, newest
from learner.loop.run_files import write_record
from tests.rigs.configs import LEARNER, living_broker, node_status, refusal, status_of, write_broker
from tests.rigs.refusals import refused
from tests.rigs.telemetry import ENDED_S, Fixture, open_folder, read_line

TOKEN = "a-token-of-the-test"
FIRST = slice(9)
EVIL = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='broken in'\">"


@pytest.fixture(scope="module")
def recorded() -> Iterator[RunDir]:
    """A run of 40 steps; no test changes it."""
    with open_folder() as folder:
        fixture = Fixture(folder / "run", 40)
        fixture.write(0, 40)
        yield fixture.run


@pytest.fixture
def shared() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


def read(view: RunView) -> RunView:
    """Read everything that is there."""
    while view.read():
        pass
    view.observe()
    return view


def client(*runs: RunDir, token: str | None = None, host: str = "localhost") -> TestClient:
    views = [read(RunView(run)) for run in runs]
    return TestClient(make_app(views, token), base_url=f"http://{host}", follow_redirects=False)


def curves_of(values: list[float], name: str = "reward_mean") -> Curves:
    curves = Curves()
    blank = read_line(tokens_trained=1)
    curves.add(msgspec.structs.replace(blank, step=step, **{name: value}) for step, value in enumerate(values))
    return curves


# ---------------------------------------------------------------- who may read


def test_without_a_token_only_local_names_are_answered(recorded):
    page = client(recorded)
    for name in ("localhost", "localhost:99", "127.0.0.1:8642", "[::1]:8642"):
        assert page.get("/", headers={"host": name}).status_code == 200
    for name in ("evil.example", "localhost.evil.example", "evil.example:8642", "[::2]:1", "127.0.0.1.nip.io", ""):
        assert page.get("/api/runs/0/tasks", headers={"host": name}).status_code == 421


PATHS = ("/", "/static/main.js", "/api/panels", "/api/events", "/api/runs/0/tasks", "/nowhere")


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_read_without_the_token(recorded, path):
    page = client(recorded, token=TOKEN, host="head.example")
    wrong = [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Bearer é"}]
    wrong += [{"cookie": f"slipstream={TOKEN}"}, {"cookie": f"slipstream-{'0' * 8}={TOKEN}"}]
    for headers in wrong:
        answer = page.get(path, headers={k: v.encode("latin-1") for k, v in headers.items()})
        assert answer.status_code == 401
        assert "fixture" not in answer.text
    for word in ("wrong", "", "é"):
        assert page.get(path, params={"token": word}).status_code == 401


def test_a_login_sets_a_cookie_and_leads_to_the_address_without_the_token(recorded):
    page = client(recorded, token=TOKEN, host="head.example")
    answer = page.get("//evil.example/", params={"token": TOKEN})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and TOKEN not in cookie
    assert page.get("/api/runs/0/tasks").json()["total"] == 168, "the client keeps the cookie"
    page.cookies.clear()
    assert page.get("/api/runs/0/tasks", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_every_answer_has_the_headers_that_keep_a_browser_safe(recorded):
    page = client(recorded)
    answers = [page.get(path) for path in ("/", "/static/main.js", "/nowhere", "/api/runs/9/nodes")]
    for answer in [*answers, page.post("/"), page.get("/", headers={"host": "evil.example"})]:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_changes_nothing_under_the_run(recorded):
    def content() -> dict[str, tuple[str, int]]:
        files = [path for path in recorded.path.rglob("*") if path.is_file()]
        return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}

    before = content()
    page = client(recorded)
    for name in ("nodes", "lanes", "tasks", "transcripts", "config", "logs"):
        assert page.get(f"/api/runs/0/{name}").status_code == 200
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        for path in PATHS:
            assert page.request(method, path).status_code == 405
    methods = {method for route in page.app.routes if route.path != "/static" for method in route.methods}
    assert methods == {"GET", "HEAD"}
    assert content() == before


def test_an_address_leads_to_no_file_but_those_of_the_page(recorded):
    page = client(recorded)
    for path in ("../web.py", "%2e%2e/web.py", "..%2fweb.py", "/etc/passwd", "%2fetc%2fpasswd", "x.js"):
        assert page.get(f"/static/{path}").status_code == 404
    numbers = [f"/api/runs/{number}/nodes" for number in ("-1", "1", "\u0663", "9" * 5000)]
    for path in ("/api/runs/../0/nodes", "/api/runs/0/..%2fnodes", *numbers):
        assert page.get(path).status_code == 404


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "ledger.json", "transcripts", "trace", "status.json"]
)
def test_a_link_that_leads_out_of_the_run_is_not_followed(recorded, tmp_path, name):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    for path in recorded.path.iterdir():
        (run.path / path.name).symlink_to(path) if path.name == name else os.link(
            path, run.path / path.name
        ) if path.is_file() else None
    view = RunView(run)
    view.observe()
    assert f"{name} leads out" in view.state["note"]
    with refused(SlipstreamError, f"{name} leads"):
        view.read()
    assert view.tail.steps == 0 and view.nodes == []
    page = TestClient(make_app([view], None), base_url="http://localhost")
    for table in ("nodes", "lanes", "tasks", "transcripts", "transcript"):
        answer = page.get(f"/api/runs/0/{table}")
        assert answer.status_code == 404 and "leads out" in answer.json()["refused"]


# ---------------------------------------------------------------- the command


def test_another_host_without_a_token_and_a_useless_token_are_refused(recorded, tmp_path, capsys):
    run, file = str(recorded.path), tmp_path / "token"
    assert "--token-file" in refusal(capsys, "web", run, "--host", "0.0.0.0")
    words = ("web", run, "--host", "0.0.0.0", "--token-file", str(file))
    assert "[Errno 2]" in refusal(capsys, *words)
    file.write_text("short\n")
    assert "16 ASCII" in refusal(capsys, *words)
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)
    assert "chmod 600" in refusal(capsys, *words)


def test_a_port_in_use_or_a_place_where_it_cannot_listen_is_refused(recorded, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(capsys, "web", str(recorded.path), "--port", str(port))
        assert f"--port {port}: " in said and "--port 0" in said
    assert "found 99999" in refusal(capsys, "web", str(recorded.path), "--port", "99999")
    token = recorded.path.parent / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    words = ("--host", "192.0.2.1", "--token-file", str(token))
    assert "cannot listen" in refusal(capsys, "web", str(recorded.path), *words)


def test_an_address_and_no_run_at_all_are_refused(capsys):
    assert "folder, not" in refusal(capsys, "web", "tcp://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        main(["web"])
    assert ended.value.code == 2


# ---------------------------------------------------------------- what it answers


def test_the_state_has_the_figures_of_top_and_status(recorded):
    state = read(RunView(recorded)).state
    assert state["figures"]["reward"].startswith("0.") and "of 2" in state["figures"]["staleness"]
    assert "more node" in state["figures"]["advice"]
    assert (state["max_staleness"], state["steps"], state["wanted"]) == (2, 40, 40)
    assert state["ages"] == [200 * 40, 384 * 40, 184 * 40, 0, 0, 0]
    assert state["waste"]["lost"]["tokens"] == 40 * 768 // 20
    assert state["broker"]["groups_ready"] == 3 and state["broker"]["oldest_lease_s"] == 400.0
    assert state["learner"]["deliveries"][0]["stage"] == "flipping"
    assert (state["phase"], state["left_s"], state["elapsed_s"]) == (
        "not running",
        None,
        round(ENDED_S - state["started_s"]),
    )
    lines = [json.loads(line) for line in recorded.metrics.read_text().splitlines()]
    rewards = [line["reward_mean"] for line in lines]
    assert state["now"]["reward"] == pytest.approx(np.mean(rewards[-10:]))
    assert state["now"]["reward_before"] == pytest.approx(np.mean(rewards[-20:-10]))
    assert state["now"]["trained_per_s"] == pytest.approx(7680 / sum(line["step_s"] for line in lines[-10:]))
    generated = lines[-1]["tokens_generated_total"] - lines[-11]["tokens_generated_total"]
    assert state["now"]["generated_per_s"] == pytest.approx(generated / sum(line["step_s"] for line in lines[-10:]))
    assert dict(state["versions"]) == {40: 2, 39: 2} and state["states"] == {"generating": 2, "flipping": 1, "gone": 1}


def test_the_rate_of_generated_tokens_follows_from_the_steps_not_from_the_clock():
    tail = MetricsTail(None, StepMetrics)
    known = {"step_s": 2.0, "reward_mean": 0.0, "learner_idle_s": 0.0, "tokens_trained": 1}
    tail.take(
        False,
        [
            read_line(
                step=step, time_s=1e9 + 2 * step - 1800.0 * (step > 15), tokens_generated_total=100 * step, **known
            )
            for step in range(21)
        ],
    )
    assert newest(tail)["generated_per_s"] == pytest.approx(50.0)


def test_the_time_left_of_a_living_job_is_that_of_its_steps(config, run):
    lines = [read_line(step, policy_version=step + 1, step_s=3.0, time_s=time.time()) for step in range(2)]
    run.metrics.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    write_json(run.run_json, {"name": "x", "started_s": time.time() - 100})
    with living_broker(config):
        state = read(RunView(run)).state
    assert (state["left_s"], state["model"]) == ((config.run.steps - 2) * 3.0, config.model.path)
    assert 100 <= state["elapsed_s"] <= 160


@pytest.mark.parametrize(("ended", "phase"), [("failed", "failed"), ("drained", "stopped"), ("running", "running")])
def test_a_job_that_is_not_live_says_how_its_learner_ended(run, ended, phase):
    write_record(run, 0, ended, 3)
    assert read(RunView(run)).state["phase"] == phase


def test_config_and_logs_are_shown_as_they_are_and_only_the_end_of_a_log(recorded, shared):
    page = client(recorded)
    assert page.get("/api/runs/0/config").json()["text"] == recorded.config.read_text()
    assert page.get("/api/runs/0/logs").json() == {"names": [], "shown": "", "text": ""}
    run = RunDir(shared / "run")
    run.logs.mkdir(parents=True)
    for number, name in enumerate(("broker-0.log", "learner-0.log")):
        (run.logs / name).write_text(f"begin of {name}\n" + "x" * 70_000 + f"\nend of {name}\n")
        os.utime(run.logs / name, (number, number))
    page = client(run)
    found = page.get("/api/runs/0/logs").json()
    assert (found["names"], found["shown"]) == (["learner-0.log", "broker-0.log"], "learner-0.log")
    assert found["text"].endswith("end of learner-0.log") and "begin" not in found["text"]
    assert page.get("/api/runs/0/logs?filter=broker-0.log").json()["text"].endswith("end of broker-0.log")
    assert page.get("/api/runs/0/logs?filter=../run.json").json()["shown"] == "learner-0.log"
    refused_ = page.get("/api/runs/0/config")
    assert refused_.status_code == 404 and "config.yaml" in refused_.json()["refused"]
    (run.logs / "learner-1.log").symlink_to("/etc/hostname")
    assert "leads out" in page.get("/api/runs/0/logs").json()["refused"]


@pytest.mark.parametrize("closed", ["home/run", "home"])
def test_without_a_token_config_and_logs_of_a_closed_folder_are_not_shown(shared, closed):
    fixture = Fixture(shared / "home" / "run", 4)
    fixture.write(0, 4)
    assert client(fixture.run).get("/api/runs/0/config").status_code == 200
    (shared / closed).chmod(0o700)
    for name in ("config", "logs"):
        found = client(fixture.run).get(f"/api/runs/0/{name}")
        assert found.status_code == 404 and "--token-file" in found.json()["refused"]
        logged_in = client(fixture.run, token=TOKEN).get(
            f"/api/runs/0/{name}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        assert "text" in logged_in.json()
    assert client(fixture.run).get("/api/runs/0/tasks").status_code == 200


def test_a_report_and_a_trace_are_offered_once_they_are_there(tmp_path):
    run = RunDir(tmp_path / "run")
    run.report.mkdir(parents=True)
    assert client(run).get("/api/runs/0/files/report.html").status_code == 404
    (run.report / "report.html").write_text("<h1>the report</h1>")
    (run.path / "trace.json").symlink_to("/etc/hostname")
    page = client(run)
    answer = page.get("/api/runs/0/files/report.html")
    assert answer.text == "<h1>the report</h1>" and "attachment" in answer.headers["content-disposition"]
    assert "leads out" in page.get("/api/runs/0/files/trace.json").json()["refused"]
    assert page.get("/api/runs/0/files/run.json").status_code == 404


def test_a_living_broker_is_asked_and_its_waits_lead_to_what_ends_them(config, run):
    with living_broker(config):
        state = read(RunView(run)).state
        assert state["live"] and "a learner to start" in state["learner"]["waiting_on"]
        assert [stall["kind"] for stall in state["stalls"]] == ["no_learner"]
        assert state["stalls"][0]["urgent"] and "; until: " in state["stalls"][0]["text"]
    late = LearnerReport(
        1, 0, "training", 3, deliveries=[Delivery("node-7", 3, "receiving", 30.0)], deliveries_waiting=1
    )
    write_json(run.status_json, status_of(node_status("node-7"), learner=late))
    write_broker(run)  # a broker that does not answer
    seen = status_of(node_status("node-7"), learner=late)
    from launch.observe.job_view import stalls_of
    from launch.observe.observation import Observation

    (stall,) = [_stall(stall, Observation(seen, True)) for stall in stalls_of(Observation(seen, True))]
    assert (stall["tab"], stall["find"]) == ("nodes", "node-7")


def test_tasks_are_filtered_and_cut_into_pages_by_the_server(recorded):
    page = client(recorded)
    first = page.get("/api/runs/0/tasks", params={"limit": 3}).json()
    assert (first["total"], [row["serial"] for row in first["rows"]]) == (168, [167, 166, 165])
    assert page.get("/api/runs/0/tasks", params={"limit": 1, "offset": 100}).json()["rows"][0]["serial"] == 67
    wanted = {"filter=11": 1, "state=dead": 1, "state=filtered": 1, "filter=step:3": 4, "filter=timeout": 1}
    wanted |= {"filter=node-0003": 42, "filter=zzz": 0}
    assert {words: page.get(f"/api/runs/0/tasks?{words}").json()["total"] for words in wanted} == wanted
    assert len(page.get("/api/runs/0/tasks?limit=100000").json()["rows"]) == 168
    assert page.get("/api/runs/0/tasks?limit=-1").status_code == 400
    assert "offset" in page.get("/api/runs/0/tasks?offset=1.5").json()["refused"]


def test_a_broker_that_gives_no_ledger_is_asked_once_for_all_who_want_it_soon(recorded, monkeypatch):
    asked = []

    def refuse(job: object) -> None:
        asked.append(job)
        raise SlipstreamError("broker not reachable: no answer")

    monkeypatch.setattr("launch.web.run_view.observe_ledger", refuse)
    page = client(recorded)
    for _ in range(3):
        answer = page.get("/api/runs/0/tasks")
        assert answer.status_code == 404 and "not reachable" in answer.json()["refused"]
    assert len(asked) == 1


def test_nodes_are_filtered_by_id_host_and_state(recorded):
    page = client(recorded)
    found = [
        page.get(f"/api/runs/0/nodes?filter={text}").json()["total"] for text in ("", "node-0002", "gone", "host-0")
    ]
    assert found == [4, 1, 1, 4]


def test_a_task_leads_to_its_transcript(recorded):
    page = client(recorded)
    (line,) = page.get("/api/runs/0/transcripts?task=159").json()["rows"]
    assert (line["sample"], line["step"], line["why"]) == (3, 39, ["share"])
    found = page.get("/api/runs/0/transcript?task=159&sample=3&step=39").json()
    assert [turn["author"] for turn in found["turns"]] == ["prompt", "policy", "environment", "policy"]
    assert found["turns"][1]["version_runs"] == [[0, 38], [5, 39]] and found["cut"] == 0
    assert page.get("/api/runs/0/transcripts?step=39").json()["total"] == 4
    assert page.get("/api/runs/0/transcript?task=159&sample=8").status_code == 404
    assert page.get("/api/runs/0/transcript?task=x&sample=8").status_code == 400


def test_transcripts_are_found_by_why_they_are_kept_and_cut_into_pages(recorded):
    page = client(recorded)
    everything = page.get("/api/runs/0/transcripts?limit=200").json()
    assert everything["more"] is False
    first = page.get("/api/runs/0/transcripts?limit=3").json()
    second = page.get("/api/runs/0/transcripts?limit=3&offset=3").json()
    assert first["rows"] + second["rows"] == everything["rows"][:6]
    assert (first["total"], first["more"], second["total"]) == (3, True, 6)
    worst = page.get("/api/runs/0/transcripts?filter=worst&limit=200").json()["rows"]
    assert worst == [row for row in everything["rows"] if "worst" in row["why"]]
    assert page.get("/api/runs/0/transcripts?filter=share").json()["rows"]
    assert page.get("/api/runs/0/transcripts?filter=nothing").json() == {"total": 0, "more": False, "rows": []}


def test_transcripts_are_found_by_reward_and_begin_with_a_preview(recorded):
    page = client(recorded)
    everything = page.get("/api/runs/0/transcripts?limit=200").json()["rows"]
    best = page.get("/api/runs/0/transcripts?limit=200&least=0.5").json()["rows"]
    rest = page.get("/api/runs/0/transcripts?limit=200&most=0.5").json()["rows"]
    assert {row["reward"] for row in best} == {1.0} and {row["reward"] for row in rest} == {0.0}
    assert len(best) + len(rest) == len(everything)
    assert best[0]["prompt"] == "What is 412 + 309?" and best[0]["answer"].endswith("</think> 721")
    long = preview(transcript_of(Turn(author="policy", text="a\n b " * 5000, tokens=[], pieces=[])))
    assert len(long["answer"]) <= 240 and "\n" not in long["answer"] and long["turns"] == []


def test_a_browser_gets_everything_once_and_then_what_is_new(tmp_path):
    fixture = Fixture(tmp_path / "run", 10)
    fixture.write(0, 4)
    view, cursor = read(RunView(fixture.run)), BrowserCopy()
    first = view.news(cursor)
    assert first is not None and len(first["curves"]["mean"]["reward_mean"]) == 10 and first["state"]["steps"] == 10
    assert view.news(cursor) is None
    fixture.steps = 12
    fixture.write(10, 0)
    new = read(view).news(cursor)
    assert new is not None
    assert (new["curves"]["first"], len(new["curves"]["mean"]["reward_mean"])) == (9, 3)
    fixture.run.metrics.write_bytes(fixture.run.metrics.read_bytes().split(b"\n")[0] + b"\n")
    rewritten = read(view).news(cursor)
    assert rewritten is not None and rewritten["state"]["steps"] == 1, "a resumed learner rewrote the file"
    assert rewritten["curves"]["first"] == 0 and len(rewritten["curves"]["mean"]["loss"]) == 1


async def test_a_stream_sends_each_run_and_then_news(tmp_path):
    fixture = Fixture(tmp_path / "run", 10)
    fixture.write(0, 4)
    hub = Hub([read(RunView(fixture.run)), RunView(RunDir(tmp_path / "none"))])
    async with hub.running(None):  # pyright: ignore[reportArgumentType]
        stream = hub.stream()
        found = [json.loads((await anext(stream)).removeprefix(b"data: ")) for _ in range(2)]
        assert [event["run"] for event in found] == [0, 1]
        fixture.steps = 11
        fixture.write(10, 0)
        steps: Any = 10
        while steps != 11:
            event = json.loads((await anext(stream)).removeprefix(b"data: "))
            steps = event.get("state", {}).get("steps", steps) if event.get("run") == 0 else steps
        await stream.aclose()
    assert hub.watchers == 0


def test_the_page_without_a_script_has_the_newest_figures_escaped(tmp_path):
    fixture = Fixture(tmp_path / "run", 10)
    fixture.write(0, 4)
    text = client(fixture.run).get("/").text
    assert "<noscript>" in text and "of 2" in text and "last known" in text
    text = client(RunDir(tmp_path / EVIL.replace("/", ""))).get("/").text
    assert "<img" not in text and text.count("<script") == 2 and "&lt;script&gt;" in text


def test_the_table_without_javascript_has_the_sentences_of_watch_rules(tmp_path):
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.status_json, status_of(learner=msgspec.structs.replace(LEARNER, alarms=["watch[0]: low <now>"])))
    assert "<th scope=row>watch rules</th><td>watch[0]: low &lt;now&gt;</td>" in client(run).get("/").text


# ---------------------------------------------------------------- bounded memory


@pytest.mark.slow
def test_curves_keep_least_mean_and_largest_in_a_bounded_number_of_buckets():
    curves = curves_of([float(step % 10) for step in range(100_000)])
    assert curves.width == 128 and curves.used == 782 <= BUCKETS
    found = curves.since(0)
    assert found["least"]["reward_mean"][:5] == [0.0] * 5 and found["most"]["reward_mean"][:5] == [9.0] * 5
    mean = np.array(found["mean"]["reward_mean"])
    assert np.abs(mean - 4.5).max() < 0.3 and np.average(mean, weights=[128] * 781 + [32]) == pytest.approx(
        4.5, abs=1e-3
    )
    assert found["mean"]["loss"] == pytest.approx([np.nan] * 782, nan_ok=True)
    assert b"null" in msgspec.json.encode(found)


def test_a_curve_of_a_maximum_keeps_the_largest_of_the_steps_of_a_bucket():
    values = [float(step % 4) for step in range(2 * BUCKETS)]
    thinned, mean = (curves_of(values, name).since(0)["mean"][name] for name in ("staleness_max", "staleness_mean"))
    assert thinned == [1.0, 3.0] * (BUCKETS // 2) and mean == [0.5, 2.5] * (BUCKETS // 2)


def test_a_curve_has_no_point_at_a_step_that_trained_nothing():
    curves = Curves()
    trained = (0, 5)
    curves.add(
        read_line(step, tokens_trained=count, loss=0.5 * count, step_s=1.0) for step, count in enumerate(trained)
    )
    found = curves.since(0)["mean"]
    assert found["loss"] == pytest.approx([np.nan, 2.5], nan_ok=True) and found["step_s"] == [1.0, 1.0]


@pytest.mark.slow
def test_curves_are_the_same_however_the_steps_arrive():
    values = list(np.random.default_rng(0).normal(size=3000))
    at_once, one_by_one = curves_of(values), Curves()
    for step, value in enumerate(values):
        one_by_one.add([read_line(step, reward_mean=value)])
    for kind in ("mean", "least", "most"):
        a, b = (np.array(c.since(0)[kind]["reward_mean"]) for c in (at_once, one_by_one))
        assert a == pytest.approx(b)
    assert at_once.width == 4 and "least" not in curves_of(values[:5]).since(0)


def test_a_lane_keeps_the_newest_states_and_shows_deaths_and_clocks_of_other_machines(tmp_path):
    run = RunDir(tmp_path)
    run.trace.mkdir()
    spans = [Span("generating" if i % 2 else "flipping", "state", 1000.0 + i, 1.0) for i in range(2 * PIECES)]
    other = [Span("episode 1", "episode", 1000.0, 9.0)]
    batch = SpanBatch(who="node-0", host="h", offset_s=5.0, spans=[*spans, *other])
    cut = msgspec.json.encode(batch)[:-9]
    (run.trace / "nodes-00000000.jsonl").write_bytes(msgspec.json.encode(batch) + b"\n[1]\n{}\n" + cut)
    last = 1000.0 + 2 * PIECES
    event = {"kind": "node_lost", "detail": {"node": "node-0"}, "time_s": last + 5.0, "index": 1}
    bad = [
        {"kind": "join", "detail": 3, "time_s": 1},
        {"kind": ["join"]},
        {"kind": "join", "detail": {}, "time_s": "x"},
    ]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in [event, *bad]))
    lanes = Lanes(run)
    lanes.page("", FIRST, 60)
    (row,) = lanes.page("node", FIRST, 10_000)["rows"]
    assert row["who"] == "node-0" and len(row["pieces"]) == PIECES + 1
    assert row["pieces"][-2] == (last + 4.0, last + 5.0, "generating")
    assert row["pieces"][-1][2] == "dead"
    more = SpanBatch(who="node-0", host="h", offset_s=5.0, spans=[Span("waiting", "state", last + 50, 1.0)])
    (run.trace / "nodes-00000001.jsonl").write_bytes(msgspec.json.encode(more) + b"\n")
    (row,) = lanes.page("", FIRST, 60)["rows"]
    assert [piece[2] for piece in row["pieces"]][-2:] == ["dead", "waiting"]
    assert row["pieces"][-2][:2] == (last + 5.0, last + 55.0)
    assert lanes.page("learner", FIRST, 60)["rows"] == []


def test_a_finished_run_says_so_and_shows_its_last_nodes_instead_of_waits_and_a_broker_that_ended(tmp_path):
    fixture = Fixture(tmp_path / "run", 40)
    fixture.write(0, 40)
    run = fixture.run
    steps = RunView(run)
    done = config_of(run).run.steps
    status = status_of(learner=msgspec.structs.replace(LEARNER, state="done"))
    write_json(run.status_json, msgspec.structs.replace(status, nodes=[], left=[node_status("node-7", alive=False)]))
    view = read(steps)
    assert "broker" in view.state["note"] and "finished" not in view.state, "the model is not there yet"
    write_record(run, 0, "done", done)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    view = read(view)
    finished = {"steps": done, "of": done, "words": f"; model in {run.model}", "held_out": {}}
    assert view.state["finished"] == finished
    with client(run) as browser:
        assert f"finished: {done} of {done}; model in {run.model}" in (page := browser.get("/").text)
        assert "broker has ended" not in page
        rows = browser.get("/api/runs/0/nodes").json()["rows"]
    assert [(row["id"], row["state"]) for row in rows] == [("node-7", "left")]
    assert view.state["states"] == {}, "those that are there"
    line = read_line(kind=EvaluationMetrics, dataset="sums", policy_version=done, mean_reward=0.75)
    with run.metrics.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
    assert read(view).state["finished"]["held_out"] == {"sums": 0.75}


def test_a_node_that_left_in_good_order_is_told_from_one_that_died(tmp_path):
    fixture = Fixture(tmp_path / "run", 40)
    fixture.write(0, 40)
    ends = [("leave", "node-0000"), ("node_lost", "node-0001")]
    lines = [{"kind": kind, "detail": {"node": node}, "time_s": 2e9, "index": 1} for kind, node in ends]
    fixture.run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {row["who"]: row["pieces"][-1].state for row in Lanes(fixture.run).page("node-", FIRST, 1e9)["rows"]}
    assert (rows["node-0000"], rows["node-0001"]) == ("left", "dead")


def test_no_state_is_missing_where_spans_of_a_process_overlap(recorded):
    lanes = Lanes(recorded)
    for _ in range(2):
        rows = lanes.page("", FIRST, 1e9)["rows"]
        assert len(rows) == 5, "the learner and four nodes"
        for row in rows:
            states = [piece.state for piece in row["pieces"] if piece.state not in ("dead", "left")]
            assert len(states) == 2 * 40, row["who"]


def test_parts_of_a_long_state_are_one_piece(tmp_path):
    run = RunDir(tmp_path)
    run.trace.mkdir()
    lanes, file = Lanes(run), run.trace / "nodes-00000000.jsonl"
    for first in (0, 2):  # the second time both lines are read, and the first one counts once
        spans = [Span("training", "state", 1000.0 + i, 1.0) for i in range(first, first + 2)]
        with file.open("ab") as written:
            written.write(msgspec.json.encode(SpanBatch(who="learner", host="h", offset_s=first / 100, spans=spans)))
            written.write(b"\n")
        (row,) = lanes.page("", FIRST, 60)["rows"]
        assert row["pieces"] == [(1000.0, pytest.approx(1000.0 + first + 2 + first / 100), "training")]


def test_processes_that_ended_long_ago_have_no_lanes_in_a_run_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.web.run_view.LANES", 2)
    run = RunDir(tmp_path)
    run.trace.mkdir()
    for number in range(4):
        batch = SpanBatch(who=f"node-{number}", host="h", spans=[Span("generating", "state", 1000.0 + number, 1.0)])
        (run.trace / f"nodes-{number:08d}.jsonl").write_bytes(msgspec.json.encode(batch) + b"\n")
    lanes = Lanes(run)
    for _ in range(2):
        assert [row["who"] for row in lanes.page("", FIRST, 60)["rows"]] == ["node-2", "node-3"]


def transcript_of(*turns: Turn) -> Transcript:
    return Transcript(serial=1, sample=0, node_id=EVIL, time_s=1.0, why=["best"], turns=list(turns), cut_tokens=5)


def test_a_transcript_of_any_size_is_cut_and_says_so():
    long = Turn(author="policy", text="", tokens=[1] * 50_000, pieces=["ab"] * 50_000, logprobs=[0.0] * 50_000)
    found = bounded(transcript_of(long, long))
    assert [len(turn["pieces"]) for turn in found["turns"]] == [TOKENS, 0]
    assert found["cut"] == 100_000 - TOKENS + 5
    assert [len(turn["logprobs"]) for turn in found["turns"]] == [TOKENS, 0]
    short = bounded(transcript_of(Turn(author="prompt", text="x", tokens=[1], pieces=[])))
    assert (short["turns"][0]["tokens"], short["turns"][0]["text"], short["cut"]) == ([1], "x", 5)


# ---------------------------------------------------------------- odd folders


def test_a_folder_without_files_is_shown_and_then_filled(tmp_path):
    run = RunDir(tmp_path / "run")
    view = read(RunView(run))
    page = TestClient(make_app([view], None), base_url="http://localhost")
    assert "no broker" in view.state["note"] and view.state["steps"] == 0
    assert page.get("/").status_code == 200
    found = {name: page.get(f"/api/runs/0/{name}").status_code for name in ("nodes", "lanes", "tasks", "transcripts")}
    assert found == {"nodes": 200, "lanes": 200, "tasks": 404, "transcripts": 200}
    Fixture(run.path, 10).write(0, 4)
    assert read(view).state["steps"] == 10 and view.state["name"] == "fixture"


def test_lines_that_are_cut_or_of_older_versions_are_shown_as_far_as_they_go(config, run):
    old = {"step": 0, "policy_version": 1, "time_s": 1.0, "reward_mean": 0.5, "tokens_by_age": [1, 2]}
    odd = {"step": 1, "reward_mean": "high", "staleness_mean": [], "samples_failed_by_reason": 3, "tokens_expired": "x"}
    evaluation = {"policy_version": 1, "mean_reward": 0.7, "dataset": "d", "step": 1}
    lines = [json.dumps(line) for line in (old, odd, {"kind": "evaluation", **evaluation})]
    run.metrics.write_text("\n".join(["not json", "[]", *lines, '{"step": 2, "reward_me']))
    write_json(run.status_json, {"pid": "x"})
    view = read(RunView(run))
    assert view.state["steps"] == 2 and view.state["evaluations"] == [read_line(kind=EvaluationMetrics, **evaluation)]
    found = view.news(BrowserCopy())
    assert found is not None and found["curves"]["mean"]["reward_mean"][0] == 0.5
    with run.metrics.open("a") as file:
        file.write('an": 0.25}\n')
    assert read(view).state["steps"] == 3


def test_hundred_megabytes_of_transcripts_do_not_take_the_server_down(recorded, tmp_path):
    run = RunDir(tmp_path / "run")
    run.transcripts.mkdir(parents=True)
    turn = Turn(author="policy", text="", tokens=list(range(20_000)), pieces=["word "] * 20_000)
    line = msgspec.json.encode(transcript_of(turn)) + b"\n"
    with (run.transcripts / "steps-00000001.jsonl").open("wb") as file:
        for _ in range(100 * (1 << 20) // len(line)):
            file.write(line)
        file.write(b"[" * (9 << 20) + b"\n")
    page = client(run)
    answer = page.get("/api/runs/0/transcript?task=1&sample=0")
    assert answer.status_code == 200 and len(answer.content) < 1 << 20
    assert page.get("/api/runs/0/transcripts?limit=5").json()["total"] <= 5


def test_the_loop_survives_a_run_that_cannot_be_read(tmp_path, caplog):
    run = RunDir(tmp_path)
    run.metrics.mkdir()

    async def look() -> None:
        async with Hub([RunView(run)]).running(None):  # pyright: ignore[reportArgumentType]
            while "cannot be read" not in caplog.text:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(look(), 60))
