"""A whole job of adapters whose only reward is a judge's: it learns from it, and pauses while the judge is away."""

from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from launch.quickstart.init import write_example
from tests.rigs.jobs import at_work, ledger, metrics, status
from tests.rigs.processes import until
from tests.rigs.waiting import read_jsonl
from tests.unit.rollout_fleet.judges import JudgeServer, completion, serving

STEPS = 30
AWAY_AFTER = 400  # requests


async def right_kind(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
    """The share of the answer's characters that are of the row's kind."""
    kind, _, answer = body["messages"][0]["content"].partition("|")
    right = str.isdigit if kind == "digits" else str.isalpha
    return completion(f"Score: {sum(map(right, answer)) / max(len(answer), 1)}")


async def until_away(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
    if len(server.bodies) > AWAY_AFTER:
        return web.Response(status=503, text="out of memory")
    return await right_kind(server, body)


def write(folder: Path, server: JudgeServer) -> None:
    write_example(folder)
    document = yaml.safe_load((folder / "config.yaml").read_text())
    document["run"]["steps"] = STEPS
    document["learner"] |= {"lora": {"rank": 8}, "optimizer": {"lr": 4e-3}}
    document["weights"] = {"encoding": "adapter"}
    document["telemetry"] = {"transcripts": 1}
    document["tasks"]["reward"] = [{"scorer": "judge"}]
    judge = {"url": server.url, "model": "judge", "prompt": "{kind}|{completion}", "verdict": "Score: (.*)"}
    document["scorers"] = {"judge": {**judge, "retries": 0, "failures": 8}}
    (folder / "config.yaml").write_text(yaml.safe_dump(document))


def waits(run: Path) -> list[str]:
    return [stall["waits_for"] for stall in status(run)["stalls"] if stall["kind"] == "scorer"]


def test_adapters_learn_from_a_judge_and_their_job_pauses_with_its_reason_while_the_judge_is_away(
    tmp_path: Path, monkeypatch: Any
) -> None:
    folder = tmp_path / "job"
    run = folder / "run"
    with serving() as server:
        write(folder, server)
        monkeypatch.chdir(folder)
        server.act = until_away
        with at_work(folder / "config.yaml") as roles:
            until("requests", lambda: len(server.bodies) > AWAY_AFTER, *roles)
            (reason,) = until("a node that waits for its scorer", lambda: waits(run), *roles)
            assert "judge" in reason
            assert "out of memory" in reason
            server.act = right_kind
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line in lines:
        own = line["environment"]
        assert set(own) == {"judge", "judge/cached", "judge/retries", "judge/seconds"}
        assert abs(line["reward_mean"] - own["judge"]) < 1e-6
    first, last = (sum(line["reward_mean"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last > first + 0.1, f"reward {first:.2f}, then {last:.2f}"
    kept = [line for path in (run / "transcripts").glob("*.jsonl") for line in read_jsonl(path)]
    good = [line for line in kept if line["error"] is None]
    assert good and all(line["notes"]["judge"].startswith("judge-v2: Score: ") for line in good)
    failed = [line["error"] for line in kept if line["stop_reason"] == "scorer_error"]
    assert failed and all("out of memory" in error for error in failed)
    assert [entry for entry in ledger(run) if entry["state"] == "dead"] == [], "no task was given up"
