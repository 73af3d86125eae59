"""Episodes whose answers functions and scorers judge, and what a launch says of scorers."""

import asyncio
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from common.config.schema import Config
from common.errors import ConfigError
from common.rollouts import Group, Sample, decode_group, encode_group
from common.transcripts import FailedTranscripts, Transcript
from launch.checks.job import check_scorers as doctor_checks
from rollout_fleet import driver_factory
from rollout_fleet.driver_factory import build_driver, check_rows
from rollout_fleet.environments.description import check_environment
from rollout_fleet.episode.driver import EpisodeDriver
from rollout_fleet.scorers import check, client
from rollout_fleet.scorers.check import check_scorers
from rollout_fleet.scorers.server import command
from tests.rigs.configs import job_of
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused
from tests.rigs.waiting import until_async
from tests.unit.rollout_fleet import judges
from tests.unit.rollout_fleet.fleet_fakes import CharacterTokenizer, ScriptedSampler, in_turn, new_host, prompts_of, say
from tests.unit.rollout_fleet.judges import JudgeServer, says, status

ROW = {"question": "1+1=", "answer": "2"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(client, "BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "PROBE_S", 0.001)
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: CharacterTokenizer())
    with judges.serving() as found:
        yield found


def job(folder: Path, server: JudgeServer, rewards: list[dict[str, Any]] | None = None, **keys: Any) -> Config:
    """A job with the scorer `judge`, whose keys `keys` change; `tasks` are further keys of tasks."""
    tasks = {"environment": None, "prompt": "{question}", "reward": rewards or [{"scorer": "judge"}]}
    tasks |= keys.pop("tasks", {})
    judge = {"url": server.url, "model": "judge", "prompt": "{prompt} Answer: {completion}", "verdict": r"Score: (.*)"}
    scorers = {"judge": {**judge, **keys}}
    config = job_of(folder, tasks=tasks, rollout={"max_tokens": 20}, scorers=scorers)
    Path(config.tasks.dataset).write_text(json.dumps(ROW) + "\n")
    return config


def driven(config: Config, *answers: str) -> tuple[EpisodeDriver, ScriptedSampler]:
    sampler = ScriptedSampler(in_turn(*map(say, answers)))
    return build_driver(config, sampler, new_host()), sampler


def samples(config: Config, *answers: str) -> list[Sample]:
    driver, sampler = driven(config, *answers)

    async def all_of_them() -> list[Sample]:
        try:
            return [await driver.run(ROW, seed=0) for _ in answers]
        finally:
            await driver.close()

    found = asyncio.run(all_of_them())
    assert prompts_of(sampler) == ["1+1="] * len(answers)
    return found


@pytest.mark.parametrize("process", [False, True])
def test_scorers_and_functions_are_summed_also_when_functions_have_processes(
    tmp_path: Path, server: JudgeServer, process: bool
) -> None:
    rewards = [{"function": "exact_match", "weight": 2.0}, {"scorer": "judge", "weight": 0.5, "name": "style"}]
    limits = {"limits": {"process": True, "memory_mib": 2048} if process else {}}
    right, again, wrong = samples(job(tmp_path, server, rewards, tasks=limits), "2", "2", "three")
    assert [sample.error for sample in (right, again, wrong)] == [None] * 3
    assert (right.reward, wrong.reward) == (2.0 + 0.5 * 1, 0.5 * 5)
    assert right.metrics.keys() == {"exact_match", "style", "style/cached", "style/retries", "style/seconds"}
    facts = ("exact_match", "style", "style/cached", "style/retries")
    assert [right.metrics[name] for name in facts] == [1.0, 1.0, 0.0, 0.0]
    assert [again.metrics[name] for name in facts] == [1.0, 1.0, 1.0, 0.0]
    assert right.metrics["style/seconds"] > 0.0
    assert len(server.bodies) == 2
    assert server.bodies[0]["messages"][0]["content"] == "1+1= Answer: 2"


def test_the_scorers_model_and_answer_are_in_the_transcript(tmp_path: Path, server: JudgeServer) -> None:
    server.acts = [says("Because. Score: 4"), says("Score: 1 " + "x" * 100_000)]
    (good, long) = samples(job(tmp_path, server, verdict=r"Score: (\d+)"), "2", "3")
    assert good.notes == {"judge": "judge-v2: Because. Score: 4"}
    assert len(long.notes["judge"]) == 500
    group = decode_group(encode_group(Group(0, [good])))
    assert group.samples[0].notes == good.notes
    line = FailedTranscripts(lambda ids: "".join(map(chr, ids)), "n0").line(group)
    assert msgspec.json.decode(line, type=Transcript).notes == good.notes


def test_a_dead_judge_costs_samples_with_reasons_and_pauses_the_node_until_it_is_back(
    tmp_path: Path, server: JudgeServer
) -> None:
    driver, _ = driven(job(tmp_path, server, retries=1, failures=2), *("2345"))
    server.act = judges.close

    async def act() -> None:
        try:
            failed = [await driver.run(ROW, seed=0) for _ in range(2)]
            assert [sample.stop_reason for sample in failed] == ["scorer_error"] * 2
            assert ["judge" in (sample.error or "") for sample in failed] == [True] * 2
            assert "judge" in driver.paused
            assert "judge" in driver.at(0.5).paused
            server.act = judges.by_length
            await until_async(lambda: not driver.paused)
            assert (await driver.run(ROW, seed=0)).error is None
        finally:
            await driver.close()

    asyncio.run(act())


def test_a_function_that_fails_asks_no_scorer(tmp_path: Path, server: JudgeServer) -> None:
    (tmp_path / "raising_rewards.py").write_text("def bad(completion, row): raise ValueError('x')\n")
    rewards = [{"function": "raising_rewards:bad"}, {"scorer": "judge"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (sample,) = samples(job(tmp_path, server, rewards), "2")
        sys.modules.pop("raising_rewards")
    assert (sample.stop_reason, server.bodies) == ("environment_error", [])


def test_a_scorer_may_take_longer_than_a_step_of_the_functions(tmp_path: Path, server: JudgeServer) -> None:
    server.acts = [judges.hang]
    limits = {"limits": {"step_s": 1.0}}
    (sample,) = samples(job(tmp_path, server, timeout_s=1.5, tasks=limits), "2")
    assert sample.error is None
    assert sample.metrics["judge/retries"] >= 1.0


def test_two_rewards_of_one_name_fail_the_sample(tmp_path: Path, server: JudgeServer) -> None:
    rewards = [{"function": "exact_match"}, {"scorer": "judge", "name": "exact_match"}]
    (sample,) = samples(job(tmp_path, server, rewards), "2")
    assert "'exact_match'" in (sample.error or "")


# ---------------------------------------------------------------- pairwise


async def longer(server: JudgeServer, body: dict[str, Any]) -> Any:
    """1 for an answer that is longer than the other one, 0.5 for one that is as long."""
    one, other = body["messages"][0]["content"].split("|")[1:]
    if "broken" in one:
        return judges.completion("I cannot say")
    return judges.completion(f"Score: {0.5 if len(one) == len(other) else float(len(one) > len(other))}")


def group_of(config: Config, *answers: Any) -> list[Sample]:
    """The samples of a group after they were compared."""
    sampler = ScriptedSampler(in_turn(*(say(a) if isinstance(a, str) else a for a in answers)))
    driver = build_driver(config, sampler, new_host())

    async def all_of_them() -> list[Sample]:
        try:
            return await driver.compared([await driver.run(ROW, seed=0) for _ in answers], ROW)
        finally:
            await driver.close()

    return asyncio.run(all_of_them())


def pairwise(folder: Path, server: JudgeServer, **keys: Any) -> Config:
    server.act = longer
    rewards = [{"function": "exact_match", "weight": 10.0}, {"scorer": "judge", "weight": 2.0}]
    return job(folder, server, rewards, kind="pairwise", prompt="{prompt}|{completion}|{other}", **keys)


def test_answers_are_compared_with_others_of_their_group(tmp_path: Path, server: JudgeServer) -> None:
    found = group_of(pairwise(tmp_path, server, opponents=2), "2", "two", say("twenty", ended=False), "too")
    assert [sample.metrics["judge"] for sample in found] == [0.0, 0.25, 1.0, 0.75]
    assert [sample.reward for sample in found] == [10.0, 0.5, 2.0, 1.5]
    assert [sum(sample.turn_rewards) for sample in found] == [10.0, 0.5, 2.0, 1.5]
    assert found[0].metrics.keys() == {"exact_match", "judge", "judge/cached", "judge/retries", "judge/seconds"}
    assert found[0].notes == {"judge": "judge-v2: Score: 0.0"}
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(asked[:2]) == ["1+1=|2|twenty", "1+1=|2|two"]
    assert len(asked) == 8


def test_a_comparison_without_a_verdict_fails_its_sample_alone(tmp_path: Path, server: JudgeServer) -> None:
    broken, fine = group_of(pairwise(tmp_path, server), "broken", "2")
    assert (broken.stop_reason, fine.error, fine.metrics["judge"]) == ("scorer_error", None, 0.0)
    assert "verdict" in (broken.error or "")


def test_an_answer_alone_has_nothing_to_be_compared_with(tmp_path: Path, server: JudgeServer) -> None:
    (alone,) = group_of(pairwise(tmp_path, server), "2")
    assert (alone.stop_reason, server.bodies) == ("scorer_error", [])


def test_failed_samples_are_not_compared(tmp_path: Path, server: JudgeServer) -> None:
    aborted = replace(say("x"), finish_reason="abort")
    failed, *good = group_of(pairwise(tmp_path, server, opponents=5), aborted, "2", "two")
    assert failed.stop_reason == "cancelled"
    assert [sample.metrics["judge"] for sample in good] == [0.0, 1.0]
    assert len(server.bodies) == 2


def test_a_comparison_does_not_take_the_place_of_another_reward_s_metric(tmp_path: Path, server: JudgeServer) -> None:
    rewards = [{"function": "exact_match", "name": "judge"}, {"scorer": "judge"}]
    server.act = longer
    config = job(tmp_path, server, rewards, kind="pairwise", prompt="{prompt}|{completion}|{other}")
    assert ["'judge'" in (sample.error or "") for sample in group_of(config, "2", "two")] == [True, True]


def test_a_sum_that_is_not_finite_fails_its_sample(tmp_path: Path, server: JudgeServer) -> None:
    config = pairwise(tmp_path, server)
    server.acts = [says("Score: 1e308")]
    huge, fine = group_of(config, "2", "two")  # times a weight of 2
    assert ("not finite" in (huge.error or ""), fine.error) == (True, None)


# ---------------------------------------------------------------- before a launch


def test_a_launch_takes_the_key_to_no_other_host(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    with judges.serving() as other:
        server.redirect = f"{other.url}/models"
        assert list(check_scorers(job(tmp_path, server, api_key_env="JUDGE_KEY"), "job.yaml")) == []
        assert (server.keys, other.keys) == (["Bearer sk-secret"], [])


def test_a_server_of_another_protocol_is_a_warning(tmp_path: Path, server: JudgeServer) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"SSH-2.0-x\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        config = job(tmp_path, server, url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        assert len(list(check_scorers(config, "job.yaml"))) == 1
        thread.join()


def test_a_launch_asks_a_judge_once_and_is_silent_about_one_that_takes_the_request(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    config = job(tmp_path, server, api_key_env="JUDGE_KEY")
    check_rows(config, check_environment(config.tasks), "job.yaml")
    assert list(check_scorers(config, "job.yaml")) == []
    assert ([*server.bodies[0]], server.keys) == (
        ["temperature", "max_tokens", "model", "messages"],
        ["Bearer sk-secret"] * 2,
    )
    assert len(server.bodies) == 1


def test_a_request_that_a_judge_refuses_is_a_problem_and_a_slow_judge_is_none(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    config = job(tmp_path, server, api_key_env="JUDGE_KEY")
    server.acts = [status(400, "Use 'max_completion_tokens' instead. sk-secret"), status(500, "broken"), judges.close]
    with refused(ConfigError, "job.yaml", "HTTP 400: Use 'max_completion_tokens' instead. ***", "null") as caught:
        list(check_scorers(config, "job.yaml"))
    assert caught.value.key == "scorers.judge"
    for fact in ("HTTP 500: broken", "does not judge"):
        (sentence,) = check_scorers(config, "job.yaml")
        assert fact in sentence
    server.act = judges.hang
    monkeypatch.setattr(check, "asked", partial(check.asked, timeout_s=0.2))
    assert list(check_scorers(config, "job.yaml")) == []


@pytest.mark.parametrize("served", [404, 500, []])
def test_an_endpoint_that_lists_no_models_is_fine(tmp_path: Path, server: JudgeServer, served: Any) -> None:
    server.served = served
    assert list(check_scorers(job(tmp_path, server), "job.yaml")) == []


def test_an_endpoint_that_does_not_answer_or_refuses_the_key_is_a_warning(tmp_path: Path, server: JudgeServer) -> None:
    server.served = 401
    config = job(tmp_path, server)
    away = job(tmp_path, server, url="http://127.0.0.1:1/v1")
    for each, fact in ((config, "401"), (away, "http://127.0.0.1:1/v1")):
        (sentence,) = check_scorers(each, "job.yaml")
        assert "scorers.judge" in sentence
        assert fact in sentence
        assert [(found.level, found.code) for found in doctor_checks(each, "job.yaml")] == [("warning", "silent")]


@pytest.mark.parametrize(
    ("keys", "key", "fact"),
    [
        ({"model": "jugde"}, "model", "'judge'"),
        ({"prompt": "{anwser} {completion}"}, "prompt", "'answer'"),
        ({"kind": "classification", "verdict": None, "label": 3}, "label", "label 3"),
    ],
)
def test_what_cannot_work_is_refused_before_a_launch(
    tmp_path: Path, server: JudgeServer, keys: dict[str, Any], key: str, fact: str
) -> None:
    server.act = judges.text('{"data": [{"probs": [0.5, 1.5]}]}')
    config = job(tmp_path, server, **keys)
    with refused(ConfigError, "job.yaml", fact) as caught:
        list(check_scorers(config, "job.yaml"))
    assert caught.value.key == f"scorers.judge.{key}"
    assert [found.level for found in doctor_checks(config, "job.yaml")] == ["problem"]


def test_a_classification_is_tried_on_the_first_row(tmp_path: Path, server: JudgeServer) -> None:
    keys = {"kind": "classification", "verdict": None, "label": 1, "prompt": "{prompt}|{completion}"}
    server.acts = [judges.text('{"data": [{"probs": [0.5, 1.5]}]}'), status(400)]
    config = job(tmp_path, server, **keys)
    assert list(check_scorers(config, "job.yaml")) == []
    assert server.bodies[0]["input"].startswith("1+1=|")
    assert len(list(check_scorers(config, "job.yaml"))) == 1


def test_the_example_of_the_page_is_a_config(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "scorers.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    tasks = {"environment": None, **blocks[0]["tasks"]}
    assert list(job_of(tmp_path, tasks=tasks, scorers=blocks[0]["scorers"]).scorers) == ["grader", "preference"]
    tasks["reward"] = [{"scorer": "preference"}]
    config = job_of(tmp_path, tasks=tasks, scorers=blocks[1]["scorers"])
    assert "--max-model-len" in command(config.scorers["preference"], "127.0.0.1", 8001, cpu=True)
