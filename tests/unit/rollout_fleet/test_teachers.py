"""A teacher against servers that answer well, late, wrongly or not at all, and what a launch refuses of one."""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from common.config.schema import Config
from common.errors import ConfigError
from common.rollouts import Group, Sample, decode_group, encode_group
from launch.checks.job import check_scorers as doctor_checks
from launch.quickstart.assets import build_tokenizer
from rollout_fleet import driver_factory
from rollout_fleet.driver_factory import build_driver
from rollout_fleet.episode.driver import EpisodeDriver
from rollout_fleet.scorers import client
from rollout_fleet.scorers.check import check_scorers
from rollout_fleet.scorers.teacher import Teacher
from tests.rigs.configs import job_of
from tests.rigs.refusals import refused
from tests.rigs.tiny_models import PLAIN
from tests.unit.rollout_fleet import judges
from tests.unit.rollout_fleet.fleet_fakes import CharacterTokenizer, ScriptedSampler, in_turn, new_host, say
from tests.unit.rollout_fleet.judges import JudgeServer, close, hang, status, text

VOCABULARY = 128
ROW = {"question": "1+1=", "answer": "2"}
Rows = list[Any]

pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def logprob(token: int, place: int) -> float:
    """A distribution over VOCABULARY tokens that no two places share."""
    weights = [1.0 / (1 + (each * 7 + place) % VOCABULARY) for each in range(VOCABULARY)]
    return math.log(weights[token] / sum(weights))


def rows_of(body: dict[str, Any]) -> Rows:
    """The answer of vLLM: nothing of the first token, then the sampled token and the most probable ones."""
    rows: Rows = [None]
    for place, token in enumerate(body["prompt"][1:], 1):
        known = {each: logprob(each, place) for each in range(VOCABULARY)}
        top = sorted(known, key=lambda each: -known[each])[: body["prompt_logprobs"]]
        rows.append({str(each): {"logprob": known[each], "rank": 1, "decoded_token": "x"} for each in [token, *top]})
    return rows


def answer(rows: Rows) -> web.Response:
    choice = {"index": 0, "text": "", "prompt_logprobs": rows}
    found = {"id": "cmpl-1", "model": "big", "system_fingerprint": "vllm-9", "choices": [choice]}
    return web.Response(text=json.dumps(found), content_type="application/json")


async def teach(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
    return answer(rows_of(body)) if "prompt_logprobs" in body else web.Response(status=404)


def lying(change: Callable[[Rows], Any]) -> judges.Act:
    async def act(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
        rows = rows_of(body)
        return answer(change(rows) or rows)

    return act


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(client, "BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "PROBE_S", 0.001)
    monkeypatch.setattr(client, "MOST_PROBE_S", 0.01)
    monkeypatch.setattr(driver_factory, "load_tokenizer", lambda path: CharacterTokenizer())
    with judges.serving() as found:
        found.act = teach
        found.served = ["big"]
        yield found


def job(folder: Path, server: JudgeServer, told: dict[str, Any] | None = None, **keys: Any) -> Config:
    """A job with the teacher `t`, whose keys `keys` change; `told` changes learner.loss.distillation."""
    scorers = {"t": {"url": server.url, "model": "big", "kind": "teacher", "retries": 1, **keys}}
    loss = {"distillation": {"teacher": "t", **(told or {})}}
    tasks = {"environment": None, "prompt": "{question}", "reward": "exact_match"}
    config = job_of(folder, tasks=tasks, rollout={"max_tokens": 20}, scorers=scorers, learner={"loss": loss})
    model = Path(config.model.path)
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    build_tokenizer().save_pretrained(model)
    return config


def driven(config: Config, *answers: str) -> EpisodeDriver:
    driver = build_driver(config, ScriptedSampler(in_turn(*map(say, answers))), new_host())
    told = config.learner.loss.distillation
    assert told is not None
    driver.teacher = Teacher.of(config, told)
    return driver


def samples(config: Config, *answers: str) -> list[Sample]:
    driver = driven(config, *answers)

    async def all_of_them() -> list[Sample]:
        try:
            return [await driver.run(ROW, seed=0) for _ in answers]
        finally:
            await driver.close()

    return asyncio.run(all_of_them())


TOP = {"objective": "forward_kl", "top_k": 3}


def test_a_sample_has_its_teachers_log_probabilities_of_its_own_tokens(tmp_path: Path, server: JudgeServer) -> None:
    (sample,) = samples(job(tmp_path, server, TOP, extra={"priority": 1}), "42")
    assert sample.error is None
    tokens = sample.tokens.numpy().tolist()
    assert server.paths == ["/v1/completions"]
    asked = {"model": "big", "prompt": tokens, "prompt_logprobs": 3, "max_tokens": 1, "temperature": 0, "priority": 1}
    assert server.bodies == [asked]
    places = np.flatnonzero(sample.loss_mask.numpy()).tolist()
    wanted = np.zeros(len(tokens), np.float32)
    wanted[places] = [logprob(tokens[place], place) for place in places]
    assert sample.teacher_logprobs is not None
    np.testing.assert_allclose(sample.teacher_logprobs.numpy(), wanted, rtol=1e-6)
    assert sample.teacher_top_ids is not None and sample.teacher_top_logprobs is not None
    ids = sample.teacher_top_ids.numpy().reshape(len(places), 3)
    values = sample.teacher_top_logprobs.numpy().reshape(len(places), 3)
    for place, mine, found in zip(places, ids, values, strict=True):
        best = sorted((-logprob(each, place), each) for each in range(VOCABULARY))[:3]
        assert mine.tolist() == [each for _, each in best]
        np.testing.assert_allclose(found, [-value for value, _ in best], rtol=1e-6)
    assert sample.notes["t"] == "big (vllm-9)"
    assert sample.teacher_s > 0
    assert decode_group(encode_group(Group(0, [sample]))).samples == [sample]


def test_other_objectives_ask_for_the_sampled_tokens_alone_and_an_evaluation_for_nothing(
    tmp_path: Path, server: JudgeServer
) -> None:
    driver = driven(job(tmp_path, server), "2", "3")

    async def both() -> tuple[Sample, Sample]:
        try:
            return await driver.run(ROW, seed=0), await driver.at(0.5).run(ROW, seed=0)
        finally:
            await driver.close()

    trained, evaluated = asyncio.run(both())
    assert [body["prompt_logprobs"] for body in server.bodies] == [0]
    assert trained.teacher_logprobs is not None and trained.teacher_top_ids is None
    assert evaluated.error is None and evaluated.teacher_logprobs is None


def test_a_failed_episode_asks_no_teacher(tmp_path: Path, server: JudgeServer) -> None:
    config = job(tmp_path, server)

    def refuse(prompt: str) -> Any:
        return ValueError("too long")

    driver = build_driver(config, ScriptedSampler(refuse), new_host())
    told = config.learner.loss.distillation
    assert told is not None
    driver.teacher = Teacher.of(config, told)

    async def run() -> Sample:
        try:
            return await driver.run(ROW, seed=0)
        finally:
            await driver.close()

    assert asyncio.run(run()).error is not None
    assert server.bodies == []


def set_row(place: int, row: Any) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[place] = row(rows[place]) if callable(row) else row

    return change


def with_value(value: float) -> Callable[[Rows], None]:
    return set_row(-1, lambda row: {key: {"logprob": value} for key in row})


LIES = {
    "one place too few": lambda rows: rows[:-1],
    "one place too many": lambda rows: [*rows, rows[-1]],
    "no places": lambda rows: [None],
    "nothing in a place": set_row(-1, None),
    "another token": set_row(-1, lambda row: {str(int(key) + 1): each for key, each in row.items()}),
    "an empty place": set_row(-1, {}),
    "not a number": with_value(math.nan),
    "infinite": with_value(-math.inf),
    "a probability of more than 1": with_value(0.5),
    "probabilities of more than 1 together": with_value(-0.5),
    "a token outside the vocabulary": set_row(-1, lambda row: row | {"128": {"logprob": -9.0}}),
    "a negative token": set_row(-1, lambda row: row | {"-1": {"logprob": -9.0}}),
    "a name for a token": set_row(-1, lambda row: row | {"two": {"logprob": -9.0}}),
    "fewer of the top": set_row(-1, lambda row: dict([*row.items()][:1])),
    "texts": set_row(-1, lambda row: {key: {"logprob": "high"} for key in row}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_teacher_that_lies_fails_the_sample_with_a_reason_and_is_not_asked_again(
    tmp_path: Path, server: JudgeServer, lie: str
) -> None:
    server.act = lying(LIES[lie])
    (sample,) = samples(job(tmp_path, server, TOP), "42")
    assert sample.stop_reason == "scorer_error"
    assert sample.error is not None and sample.error.startswith("t: ")
    assert sample.teacher_logprobs is None
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("act", "asked"),
    [
        (text("{"), 1), (text("{}"), 1), (text('{"choices": []}'), 1), (text('{"choices": [{"text": "a"}]}'), 1),
        (text('{"choices": [{"prompt_logprobs": null}]}'), 1), (status(400), 1), (status(500), 2), (status(429), 2),
        (close, 2), (hang, 2),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_answer_fails_the_sample_after_its_retries(
    tmp_path: Path, server: JudgeServer, act: judges.Act, asked: int
) -> None:
    server.act = act
    (sample,) = samples(job(tmp_path, server, timeout_s=0.3 if act is hang else 20.0), "42")
    assert sample.stop_reason == "scorer_error"
    assert sample.error is not None
    assert len(server.bodies) == asked


def test_a_node_pauses_while_its_teacher_fails_and_goes_on_when_it_answers(tmp_path: Path, server: JudgeServer) -> None:
    server.act = lying(with_value(math.nan))
    driver = driven(job(tmp_path, server, failures=2), "1", "2", "3")

    async def run() -> list[str]:
        try:
            said = [driver.paused]
            for _ in range(2):
                await driver.run(ROW, seed=0)
                said.append(driver.paused)
            server.act = teach
            while driver.paused:
                await asyncio.sleep(0.001)
            return [*said, driver.paused, str((await driver.run(ROW, seed=0)).error)]
        finally:
            await driver.close()

    before, first, second, after, error = asyncio.run(asyncio.wait_for(run(), 60))
    assert (before, first, after, error) == ("", "", "", "None")
    assert "2 scores of t failed" in second


# ---------------------------------------------------------------- before a launch


def test_a_teacher_that_fits_is_asked_about_a_few_tokens_and_nothing_is_said(
    tmp_path: Path, server: JudgeServer
) -> None:
    server.facts = {"max_model_len": 513}
    assert list(check_scorers(job(tmp_path, server, TOP), "job.yaml")) == []
    assert [body["prompt_logprobs"] for body in server.bodies if "prompt_logprobs" in body] == [0, 3]


def test_a_teacher_with_a_shorter_context_is_refused(tmp_path: Path, server: JudgeServer) -> None:
    server.facts = {"max_model_len": 512}
    with refused(ConfigError, "job.yaml", "512", "513") as caught:
        list(check_scorers(job(tmp_path, server), "job.yaml"))
    assert caught.value.key == "scorers.t.model"


def test_more_tokens_than_the_teacher_gives_are_refused(tmp_path: Path, server: JudgeServer) -> None:
    async def at_most_two(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
        many = body.get("prompt_logprobs", 0) > 2
        return web.Response(status=400, text="Requested prompt logprobs of 3") if many else await teach(server, body)

    server.act = at_most_two
    with refused(ConfigError, "job.yaml", "3") as caught:
        list(check_scorers(job(tmp_path, server, TOP), "job.yaml"))
    assert caught.value.key == "learner.loss.distillation.top_k"
    assert [found.level for found in doctor_checks(job(tmp_path, server, TOP), "job.yaml")] == ["problem"]


@pytest.mark.parametrize("act", [status(500), status(404), text("{}"), lying(with_value(math.nan)), close])
def test_a_teacher_that_gives_nothing_yet_is_a_warning(tmp_path: Path, server: JudgeServer, act: judges.Act) -> None:
    server.act = act
    (sentence,) = check_scorers(job(tmp_path, server), "job.yaml")
    assert "scorers.t" in sentence


def test_a_server_that_reads_texts_otherwise_is_refused(tmp_path: Path, server: JudgeServer) -> None:
    async def other(server: JudgeServer, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"tokens": [1, 2, 3], "count": 3}) if "text" not in body else web.Response(status=404)

    server.act = other
    with refused(ConfigError, "job.yaml", server.url) as caught:
        list(check_scorers(job(tmp_path, server), "job.yaml"))
    assert caught.value.key == "scorers.t"
    assert server.paths == ["/tokenize"]


def other_vocabulary(tokenizer: Any, folder: Path) -> None:
    tokenizer.add_tokens(["<another>"])


def other_end(tokenizer: Any, folder: Path) -> None:
    tokenizer.eos_token = "a"


def other_template(tokenizer: Any, folder: Path) -> None:
    tokenizer.chat_template = PLAIN


def other_ends(tokenizer: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (other_vocabulary, "vocabulary"),
        (other_end, "end of sequence"),
        (other_ends, "end of sequence"),
        (other_template, "chat template"),
    ],
)
@pytest.mark.parametrize("served", [False, True])
def test_a_folder_whose_tokenizer_is_not_the_policys_is_refused(
    tmp_path: Path, server: JudgeServer, change: Callable[[Any, Path], None], fact: str, served: bool
) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    keys = {"serve": {"model": str(folder)}} if served else {"tokenizer": str(folder)}
    config = job(tmp_path, server, **keys)
    assert list(check_scorers(config, "job.yaml")) == []
    change(tokenizer, folder)
    tokenizer.save_pretrained(folder)
    with refused(ConfigError, "job.yaml", fact, folder) as caught:
        list(check_scorers(config, "job.yaml"))
    assert caught.value.key == "scorers.t"


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path: Path, server: JudgeServer) -> None:
    config = job(tmp_path, server, tokenizer=str(tmp_path / "nowhere"))
    with refused(ConfigError, "job.yaml", "nowhere") as caught:
        list(check_scorers(config, "job.yaml"))
    assert caught.value.key == "scorers.t.tokenizer"


@pytest.mark.parametrize("served", [False, True])
def test_a_folder_without_a_tokenizer_is_refused_by_the_teachers_key(
    tmp_path: Path, server: JudgeServer, served: bool
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    config = job(tmp_path, server, **({"serve": {"model": str(folder)}} if served else {"tokenizer": str(folder)}))
    with refused(ConfigError, "job.yaml", folder) as caught:
        list(check_scorers(config, "job.yaml"))
    assert caught.value.key == ("scorers.t.serve" if served else "scorers.t.tokenizer")
    assert [found.level for found in doctor_checks(config, "job.yaml")] == ["problem"]
