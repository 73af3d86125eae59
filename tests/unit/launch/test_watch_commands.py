"""Commands of watch rules: only a config file or a command line on the learner's machine may set them."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.config.loading import build_config
from common.errors import ConfigError
from common.process.run_dir import RunDir
from launch.cli import main, parse
from launch.resolve_target import job_of, joined_config, without_commands
from launch.up import roles
from tests.rigs.configs import document_of, living_broker, prepared, refusal, status_of, text_of
from tests.rigs.configs import job_of as config_of
from tests.rigs.waiting import read_jsonl


def rules(marker: Path) -> list[dict[str, Any]]:
    words = ["touch", str(marker)]
    return [
        {"metric": "loss", "above": -1e9, "do": "run", "command": words},
        {"metric": "reward_mean", "below": 0.1, "do": "stop"},
        {"metric": "loss", "above": -1e9, "do": "warn", "command": words},
    ]


def joined(address: str, *overrides: str) -> argparse.Namespace:
    return parse(["learner", "--join", address, *overrides])


@pytest.fixture
def malicious(tmp_path: Path):
    """A broker that hands out a config with commands."""
    document = document_of(tmp_path)
    document["watch"] = rules(tmp_path / "marker")
    config = config_of(tmp_path)
    prepared(config)
    with living_broker(config, handed_out=json.dumps(document).encode()) as server:
        yield server.address


def test_commands_in_a_brokers_config_have_no_effect_and_an_event_says_so(malicious, tmp_path, capsys, monkeypatch):
    started: list[Any] = []
    monkeypatch.setattr(roles.os, "execvpe", lambda *words: started.append(words))
    main(["learner", "--join", malicious])
    ((_, command, _),) = started
    written = command[command.index("--config") + 1]
    config = build_config(_yaml(written), written)  # as the learner's ranks read it
    assert [(rule.do, rule.command) for rule in config.watch] == [("warn", []), ("stop", []), ("warn", [])]
    assert "marker" not in Path(written).read_text()
    (event,) = [e for e in read_jsonl(RunDir(tmp_path / "run").events) if e["kind"] == "watch_commands_ignored"]
    assert event["detail"] == {"rules": ["watch[0]", "watch[2]"], "broker": malicious}
    assert "watch[0], watch[2]" in capsys.readouterr().err


def _yaml(path: str) -> Any:
    import yaml

    return yaml.safe_load(Path(path).read_text())


def test_a_node_gets_no_commands_either_and_this_machines_words_may_set_one(malicious) -> None:
    for reader, args in (("node", parse(["rollout", "--join", malicious])), ("learner", joined(malicious))):
        config, *_ = job_of(args, reader)  # type: ignore[arg-type]
        assert [rule.command for rule in config.watch] == [[], [], []]
    own = "watch=[{metric: loss, above: 3, do: run, command: [page, me]}]"
    config, *_ = job_of(joined(malicious, own), "learner")
    assert [rule.command for rule in config.watch] == [["page", "me"]]


@pytest.mark.parametrize(
    "watch", [3, "run", {"do": "run", "command": ["x"]}, [3], [["x"]], [{"do": ["run"]}], [{"command": {"a": 1}}], None]
)
def test_a_malformed_list_of_rules_is_refused_or_without_effect(watch: object, tmp_path: Path) -> None:
    document = document_of(tmp_path)
    document["watch"] = watch
    with pytest.raises(ConfigError) as refused:
        joined_config(msgspec.json.encode(document), "tcp://here:1", ())
    assert refused.value.key.startswith("watch")


def test_a_config_that_is_no_mapping_has_no_commands() -> None:
    assert without_commands([{"watch": []}]) == without_commands({"watch": {}}) == without_commands(None) == []


# ---------------------------------------------------------------- what the operator sees


def test_status_shows_the_rules_whose_metric_is_not_well(tmp_path: Path) -> None:
    from launch.observe.job_view import render_status
    from launch.observe.observation import Observation

    alarm = "watch[0]: loss was 9, above 3 at step 6"
    status = status_of()
    learner = msgspec.structs.replace(status.learner, alarms=[alarm], paused=alarm)
    seen = Observation(msgspec.structs.replace(status, learner=learner), live=True)
    shown = text_of(render_status(None, seen))
    assert shown.count(alarm) == 3, "as an alarm, as the stall, and behind the learner's wait"
    assert "resume /runs/demo" in shown
    assert alarm not in text_of(render_status(None, Observation(status, live=True)))


def test_nothing_can_be_resumed_before_the_first_step(tmp_path: Path, capsys) -> None:
    run = prepared(config_of(tmp_path))
    assert f"`slipstream up {run.config}`" in refusal(capsys, "resume", str(run.path)), "it has no rules"
    watched = build_config(document_of(tmp_path) | {"watch": rules(tmp_path)[:2]}, "job.yaml")
    run.config.write_bytes(msgspec.yaml.encode(watched))
    assert "no step" in refusal(capsys, "resume", str(run.path))
    run.metrics.write_text('{"step": 6}\n{"step": 7}\n{"kind": "evaluation"}\n')
    assert main(["resume", str(run.path)]) == 0
    assert json.loads(run.resume_json.read_text()) == {"step": 7}
    run.metrics.write_text('{"kind": "evaluation", "step": 0}\n')
    assert main(["resume", str(run.path)]) == 0
    assert json.loads(run.resume_json.read_text()) == {"evaluation": 0}
    run.metrics.write_text('{"step": 6}\n{"kind": "evaluation", "step": 4}\n{"step": 7}\n')
    assert main(["resume", str(run.path)]) == 0
    assert json.loads(run.resume_json.read_text()) == {"step": 7, "evaluation": 4}
    assert "evaluation 4" in capsys.readouterr().out
