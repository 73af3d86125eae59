"""A scorer's client against servers that answer well, late, wrongly or not at all."""

import asyncio
import gc
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from common.config.scorers import ScorerConfig
from common.config.tasks import MessageConfig
from rollout_fleet.scorers import client, requests
from rollout_fleet.scorers.client import Scorer
from rollout_fleet.scorers.requests import ScorerFailed, score_of
from tests.rigs.refusals import refused
from tests.rigs.waiting import until_async
from tests.unit.rollout_fleet import judges
from tests.unit.rollout_fleet.judges import JudgeServer, completion, hang, says, status, text

ROW = {"question": "Why?"}
VERDICT = r"Score: (\S+)"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    """A server, and clients that retry at once."""
    monkeypatch.setattr(client, "BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "PROBE_S", 0.001)
    monkeypatch.setattr(client, "MOST_PROBE_S", 0.01)
    with judges.serving() as found:
        yield found


def judge(server: JudgeServer, **keys: Any) -> ScorerConfig:
    keys = {"prompt": "{question} {prompt} Answer: {completion}", "verdict": VERDICT, **keys}
    return ScorerConfig(url=server.url, model="judge", **keys)


# Servers and clients that are broken off on purpose leave sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """No such socket is found in another file's test."""
    yield
    gc.collect()


def using(config: ScorerConfig, act: Callable[[Scorer], Awaitable[Any]]) -> Any:
    """The value that `act` returns for a scorer, which is closed afterwards."""

    async def run() -> Any:
        scorer = Scorer("grader", config)
        try:
            return await act(scorer)
        finally:
            await scorer.close()

    return asyncio.run(run())


def score(config: ScorerConfig, *completions: str) -> list[Any]:
    """The scores, or failures, of completions that are asked for at once."""
    return using(
        config,
        lambda scorer: asyncio.gather(*(scorer.score("P", c, ROW) for c in completions), return_exceptions=True),
    )


def reason(config: ScorerConfig) -> str:
    (error,) = score(config, "abc")
    assert isinstance(error, ScorerFailed), error
    assert error.reason == "scorer_error"
    return str(error)


# ---------------------------------------------------------------- requests and scores


def test_a_rubric_is_asked_at_temperature_0_and_the_last_verdict_counts(server: JudgeServer) -> None:
    server.act = says("Score: 1? No. Score: -2.5")
    ((found, known),) = score(judge(server, extra={"chat_template_kwargs": {"enable_thinking": False}}), "abc")
    assert (found.value, known, found.retries, found.said) == (-2.5, False, 0, "judge-v2: Score: 1? No. Score: -2.5")
    assert server.bodies == [
        {
            "model": "judge",
            "messages": [{"role": "user", "content": "Why? P Answer: abc"}],
            "temperature": 0,
            "max_tokens": 512,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert server.paths == ["/v1/chat/completions"]


def test_a_judge_that_reasons_gets_another_temperature_and_none_of_the_fields_that_it_refuses(
    server: JudgeServer,
) -> None:
    server.act = says("Score: 1", finish_reason="length")
    extra = {"temperature": 1, "max_tokens": None, "max_completion_tokens": 64}
    assert "cut at its limit of tokens" in reason(judge(server, extra=extra))
    reason(judge(server, extra={"temperature": None}))
    fields = [{name: found for name, found in body.items() if name != "messages"} for body in server.bodies]
    assert fields == [
        {"model": "judge", "temperature": 1, "max_completion_tokens": 64},
        {"model": "judge", "max_tokens": 512},
    ]


def test_places_in_an_answer_are_not_filled(server: JudgeServer) -> None:
    score(judge(server), "{question} {{x}}")
    assert server.bodies[0]["messages"][0]["content"] == "Why? P Answer: {question} {{x}}"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Correct", 1.0),
        ("It is correct. No: not correct.", 0.0),
        ("INCORRECT", None),
        ("partly_correct", None),
        ("It is half right", 0.5),
        ("", None),
        (None, None),
    ],
)
def test_labels_are_whole_words_the_last_and_the_longest_counts(answer: str | None, expected: float | None) -> None:
    config = ScorerConfig(url="-", model="j", prompt="-", verdict={"correct": 1, "Not correct": 0, "half right": 0.5})
    body = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
    if expected is None:
        with refused(ScorerFailed, "verdict"):
            score_of(config, body)
    else:
        assert score_of(config, body).value == expected


@pytest.mark.parametrize("answer", ["Score: 3", "Is it Score: 1 or Score: 5? It", "Score", None])
def test_an_answer_that_was_cut_has_no_verdict(server: JudgeServer, answer: str | None) -> None:
    server.act = says(answer, finish_reason="length")
    assert "max_tokens (512)" in reason(judge(server))


@pytest.mark.parametrize("messages", [False, True])
def test_classification_takes_the_raw_score_of_a_label(server: JudgeServer, messages: bool) -> None:
    server.act = text('{"data": [{"index": 0, "label": "x", "probs": [0.25, -7.5], "num_classes": 2}]}')
    talk = [MessageConfig(role="user", content="{prompt}"), MessageConfig(role="assistant", content="{completion}")]
    prompt: Any = talk if messages else "{completion}"
    config = judge(server, kind="classification", verdict=None, label=1, prompt=prompt)
    ((found, _),) = score(config, "abc")
    said = [{"role": "user", "content": "P"}, {"role": "assistant", "content": "abc"}]
    given = {"messages": said} if messages else {"input": "abc"}
    assert (found.value, found.said) == (-7.5, "judge: 0.25, -7.5")
    assert (server.paths, server.bodies) == (["/classify"], [{"model": "judge", "use_activation": False, **given}])


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        ('{"data": [{"probs": [NaN]}]}', "NaN"),
        ('{"data": [{"probs": [1e999]}]}', "1e999"),
        ('{"data": [{"probs": [0.5]}]}', "label 1"),
        ('{"data": []}', "data"),
        ('{"data": [{"probs": "high"}]}', "probs"),
    ],
)
def test_a_classification_that_is_no_number_fails(server: JudgeServer, answer: str, fact: str) -> None:
    server.act = text(answer)
    assert fact in reason(judge(server, kind="classification", verdict=None, label=1))
    assert len(server.bodies) == 1


def test_a_verdict_that_takes_too_long_fails_its_sample_alone(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "VERDICT_S", 0.1)
    server.acts = [says("a" * 28)]  # minutes without a bound
    slow, fine = score(judge(server, verdict="((?:a+)+)b", concurrency=1), "abc", "other")
    assert ("took longer" in str(slow), "no verdict" in str(fine)) == (True, True)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


# ---------------------------------------------------------------- what fails, and what is tried again


@pytest.mark.parametrize(
    ("act", "fact"),
    [
        (says("Score: nan"), "nan"),
        (says("Score: 1e999"), "inf"),
        (says("Score: high"), "high"),
        (says("a fine answer"), "verdict"),
        (says(None), "verdict"),
        (text("<html>"), "<html>"),
        (text('{"choices": []}'), "choices"),
        (text('{"choices": [{"message": {"content": ["x"]}}]}'), "content"),
        (text("[" * 100_000), "[["),
        (text('{"x": ' + "[" * 100_000), "[["),
        (text(" " * (client.ANSWER_BYTES + 1)), str(client.ANSWER_BYTES)),
        (status(400, "too long"), "too long"),
        (status(401), "401"),
        (status(302, Location="http://127.0.0.1:9/"), "302"),
    ],
)
def test_a_bad_answer_fails_its_sample_without_another_try(server: JudgeServer, act: judges.Act, fact: str) -> None:
    server.act = act
    found = reason(judge(server))
    assert fact in found
    assert found.startswith("grader: ")
    assert len(server.bodies) == 1


@pytest.mark.parametrize("act", [status(500), status(503), status(429), status(408), judges.close])
def test_what_may_pass_is_tried_again(server: JudgeServer, act: judges.Act) -> None:
    server.acts = [act, act]
    ((found, _),) = score(judge(server), "abc")
    assert (found.value, found.retries, len(server.bodies)) == (3.0, 2, 3)
    assert server.bodies[0] == server.bodies[2]


@pytest.mark.parametrize("act", [status(500, "overloaded"), judges.close])
def test_retries_come_to_an_end(server: JudgeServer, act: judges.Act) -> None:
    server.act = act
    assert "2 retries" in reason(judge(server, retries=2))
    assert len(server.bodies) == 3


def test_a_request_that_hangs_is_made_again(server: JudgeServer) -> None:
    server.acts = [hang]
    ((found, _),) = score(judge(server, timeout_s=0.2), "abc")
    assert found.value == 3.0
    assert found.retries >= 1  # more on a busy machine
    assert found.seconds >= 0.2


def test_a_deadline_ends_all_tries(server: JudgeServer) -> None:
    server.act = hang
    assert "0.3 s" in reason(judge(server, timeout_s=0.1, deadline_s=0.3, retries=1000))


def test_a_server_that_is_not_there_fails_the_sample(server: JudgeServer) -> None:
    config = judge(server, retries=1)
    dead = ScorerConfig(url="http://127.0.0.1:1/v1", model="judge", prompt=config.prompt, verdict=VERDICT, retries=1)
    assert "127.0.0.1:1" in reason(dead)


@pytest.mark.parametrize("date", [False, True])
def test_all_requests_wait_as_retry_after_says(server: JudgeServer, date: bool) -> None:
    wait = formatdate(client.time.time() + 2, usegmt=True) if date else "1"
    server.acts = [status(429, Retry_After=wait)]

    async def act(scorer: Scorer) -> None:
        await scorer.score("P", "a", ROW)
        await scorer.score("P", "b", ROW)

    using(judge(server), act)
    first, *others = server.times
    assert len(others) == 2
    assert min(others) - first >= (0.9 if not date else 0.5)


def test_a_wait_beyond_the_deadline_fails_at_once_for_every_sample(server: JudgeServer) -> None:
    server.act = status(429, "quota", Retry_After="3600")

    async def act(scorer: Scorer) -> list[Any]:
        return [await asyncio.gather(scorer.score("P", each, ROW), return_exceptions=True) for each in "ab"]

    found = [str(error) for (error,) in using(judge(server), act)]
    assert ["quota" in error for error in found] == [True, True]
    assert len(server.bodies) == 1


@pytest.mark.parametrize("wrong", ["soon", "-5", "1e400", "\N{SUPERSCRIPT TWO}", "Thu, 99 Nov 2026 00:00:00 GMT"])
def test_a_retry_after_that_cannot_be_read_is_none(wrong: str) -> None:
    assert client._wait_of(wrong) == 0.0


# ---------------------------------------------------------------- bounds


def test_as_many_requests_as_allowed_run_at_once_and_no_more(server: JudgeServer) -> None:
    server.wanted = 3
    server.act = server.together
    found = score(judge(server, concurrency=3), *(str(10**n) for n in range(9)))
    assert [each.value for each, _ in found] == list(range(1, 10))
    assert server.most_at_once == 3


def test_requests_keep_the_rate_also_after_some_gave_up(server: JudgeServer) -> None:
    config = judge(server, requests_per_minute=600, timeout_s=1.0, deadline_s=1.0)

    async def act(scorer: Scorer) -> list[Any]:
        gone = [asyncio.create_task(scorer.score("P", f"gone {n}", ROW)) for n in range(3)]
        await until_async(lambda: len(server.times) == 1)
        for task in scorer._running:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        return await asyncio.gather(*(scorer.score("P", each, ROW) for each in "abcd"))

    assert len(using(config, act)) == 4
    gaps = [after - before for before, after in zip(server.times, server.times[1:], strict=False)]
    assert len(server.times) == 5
    assert min(gaps) > 0.05
    assert sum(gaps) >= 0.39


# ---------------------------------------------------------------- the cache


def test_an_answer_is_judged_once_also_while_it_is_judged(server: JudgeServer) -> None:
    async def act(scorer: Scorer) -> list[bool]:
        at_once = await asyncio.gather(*(scorer.score("P", "abc", ROW) for _ in range(4)))
        later = await scorer.score("P", "abc", ROW)
        other = await scorer.score("Q", "abc", ROW)
        return [known for _, known in (*at_once, later, other)]

    assert using(judge(server), act) == [False, True, True, True, True, False]
    assert len(server.bodies) == 2


def test_the_cache_forgets_what_was_not_used_for_longest(server: JudgeServer) -> None:
    async def act(scorer: Scorer) -> list[bool]:
        return [(await scorer.score("P", each, ROW))[1] for each in ("a", "b", "a", "c", "a", "b")]

    assert using(judge(server, cache=2), act) == [False, False, True, False, True, False]


def test_no_cache_asks_each_time(server: JudgeServer) -> None:
    assert [known for _, known in score(judge(server, cache=0), "a", "a")] == [False, False]


def test_a_failure_is_not_remembered(server: JudgeServer) -> None:
    server.acts = [status(400)]

    async def act(scorer: Scorer) -> float:
        with refused(ScorerFailed, "400"):
            await scorer.score("P", "abc", ROW)
        return (await scorer.score("P", "abc", ROW))[0].value

    assert using(judge(server), act) == 3.0


def test_a_sample_that_gives_up_takes_no_score_from_another(server: JudgeServer) -> None:
    server.wanted = 2
    server.act = server.together

    async def act(scorer: Scorer) -> float:
        first = asyncio.create_task(scorer.score("P", "abc", ROW))
        second = asyncio.create_task(scorer.score("P", "abc", ROW))
        await until_async(lambda: server.now == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await scorer.score("P", "other", ROW)
        return (await second)[0].value

    assert using(judge(server), act) == 3.0


def test_a_closed_scorer_leaves_no_request_behind(server: JudgeServer) -> None:
    server.act = hang

    async def act(scorer: Scorer) -> None:
        waiting = asyncio.create_task(scorer.score("P", "abc", ROW))
        await until_async(lambda: server.now == 1)
        await scorer.close()
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
        await until_async(lambda: server.now == 0)

    using(judge(server), act)


# ---------------------------------------------------------------- keys


def test_the_key_goes_to_the_server_and_into_no_message(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    server.act = status(401, "wrong key sk-secret")
    found = reason(judge(server, api_key_env="JUDGE_KEY", failures=1))
    assert server.keys[0] == "Bearer sk-secret"
    assert "sk-secret" not in found + caplog.text
    assert "wrong key ***" in found


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-\0secret"])
def test_a_key_that_is_no_header_fails_scores_as_any_other_reason(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    if "\0" in key:  # no variable has it
        monkeypatch.setattr(client.os, "environ", {"JUDGE_KEY": key})
    else:
        monkeypatch.setenv("JUDGE_KEY", key)

    async def act(scorer: Scorer) -> str:
        with refused(ScorerFailed, "grader: ") as caught:
            await scorer.score("P", "a", ROW)
        assert scorer.paused
        return str(caught.value)

    found = using(judge(server, api_key_env="JUDGE_KEY", failures=1), act)
    assert ("secret" in found, server.bodies) == (False, [])


def test_a_long_answer_is_not_kept_whole(server: JudgeServer) -> None:
    server.acts = [says("x" * 100_000 + " Score: 1")]
    ((found, _),) = score(judge(server), "abc")
    assert (found.value, len(found.said)) == (1.0, 500)


# ---------------------------------------------------------------- too many failures


@pytest.mark.parametrize(("scored", "asked"), [(True, {"fine"}), (False, {"b", "c"})])
def test_failures_in_a_row_pause_the_node_until_a_request_that_had_a_score_or_else_a_failed_one_has_one(
    server: JudgeServer, caplog: pytest.LogCaptureFixture, scored: bool, asked: set[str]
) -> None:
    server.act = status(400, "broken")

    async def act(scorer: Scorer) -> None:
        async def failed(name: str) -> None:
            with refused(ScorerFailed, "broken"):
                await scorer.score("P", name, ROW)

        if scored:
            await failed("a")
            assert scorer.paused == ""
            server.acts = [says("Score: 1")]
            await scorer.score("P", "fine", ROW)  # the row is broken
        await failed("b")
        await failed("c")
        assert "broken" in scorer.paused
        assert "grader" in scorer.paused
        seen = len(server.bodies)
        await until_async(lambda: len(server.bodies) >= seen + 3)  # it stays paused while they fail
        assert scorer.paused
        server.act = judges.by_length
        await until_async(lambda: not scorer.paused)
        assert {body["messages"][0]["content"].split()[-1] for body in server.bodies[seen:]} == asked

    using(judge(server, failures=2), act)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def _refuses_poison(server: JudgeServer, body: dict[str, Any]) -> Any:
    act = status(400) if body["messages"][0]["content"].endswith("poison") else judges.by_length
    return await act(server, body)


def test_samples_that_no_server_could_judge_do_not_prolong_a_pause(server: JudgeServer) -> None:
    server.act = _refuses_poison

    async def act(scorer: Scorer) -> None:
        await scorer.score("P", "fine", ROW)
        for number in range(8):
            with refused(ScorerFailed, "400"):
                await scorer.score("P", f"{number} poison", ROW)
        assert scorer.paused
        await until_async(lambda: not scorer.paused)

    using(judge(server, failures=8), act)


def test_an_answer_of_another_sample_ends_the_pause(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_S", 1000.0)
    monkeypatch.setattr(client, "MOST_PROBE_S", 1000.0)
    server.acts = [status(400)]

    async def act(scorer: Scorer) -> None:
        with refused(ScorerFailed, "400"):
            await scorer.score("P", "a", ROW)
        assert scorer.paused
        await scorer.score("P", "b", ROW)
        assert not scorer.paused

    using(judge(server, failures=1), act)


def test_an_answer_that_comes_while_a_failed_request_is_asked_again_ends_that(server: JudgeServer) -> None:
    server.acts = [status(400), hang]

    async def act(scorer: Scorer) -> None:
        with refused(ScorerFailed, "400"):
            await scorer.score("P", "a", ROW)
        await until_async(lambda: len(server.bodies) == 2)  # the same request
        await scorer.score("P", "b", ROW)
        assert not scorer.paused
        await until_async(lambda: server.now == 0)
        server.acts = [status(400)]
        with refused(ScorerFailed, "400"):
            await scorer.score("P", "c", ROW)
        await until_async(lambda: not scorer.paused)

    using(judge(server, failures=1), act)


async def _slow(server: JudgeServer, body: dict[str, Any]) -> Any:
    await asyncio.sleep(0.05)
    return completion("Score: 1")


def test_a_slow_answer_is_an_answer(server: JudgeServer) -> None:
    server.act = _slow
    ((found, _),) = score(judge(server), "abc")
    assert (found.value, found.retries) == (1.0, 0)
