"""A scorer's requests, and the scores in its answers. Standard library and msgspec only: a launch checks them too."""

import json
import math
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from common.config.scorers import JUDGE_FIELDS, ScorerConfig
from rollout_fleet.environments.builtin.reward_function import filled
from rollout_fleet.environments.protocol import Chat, StopReason
from rollout_fleet.episode.driver import NOTE_CHARS, EpisodeFailed

SHOWN_CHARS = 200
ANSWER_BYTES = 1 << 20
VERDICT_S = 2.0  # for the search of a verdict in an answer


class ScorerFailed(EpisodeFailed):
    """A scorer gave no score; the sample fails with the message."""

    def __init__(self, message: str) -> None:
        super().__init__(message, StopReason.SCORER_ERROR)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The content of a scorer's answer, and its cost."""

    retries: int = 0
    seconds: float = 0.0  # from the question to the answer, with all waits


@dataclass(frozen=True)
class Score(Answer):
    value: float
    said: str  # the beginning of the model's name by its server, and of what it answered


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    model: str = ""


class _Labels(msgspec.Struct):
    probs: list[float]


class _Classification(msgspec.Struct):
    data: Annotated[list[_Labels], msgspec.Meta(min_length=1, max_length=1)]
    model: str = ""


def text_of_prompt(prompt: Chat) -> str:
    """The text for {prompt}: the contents of its messages."""
    return "\n\n".join(content for _, content in prompt.messages)


def address_of(scorer: ScorerConfig) -> str:
    """Where its requests go; vLLM's /classify is beside /v1."""
    base = scorer.url.rstrip("/")
    if scorer.kind == "classification":
        return f"{base.removesuffix('/v1')}/classify"
    return f"{base}/completions" if scorer.kind == "teacher" else f"{base}/chat/completions"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def asked(url: str, body: bytes | None = None, *, key: str = "", timeout_s: float = 5.0) -> bytes:
    """The first ANSWER_BYTES of what `url` answers, without proxies, as the node's client asks; raises as urlopen."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
    with direct.open(urllib.request.Request(url, body, headers), timeout=timeout_s) as answer:
        return answer.read(ANSWER_BYTES)


def body_of(scorer: ScorerConfig, row: Mapping[str, Any], *, prompt: str, completion: str, other: str = "") -> bytes:
    """The JSON of the request for a completion. Raises ValueError for a column that the row lacks.

    `other`: the answer of the group that a pairwise scorer compares it with.
    """
    values = {**row, "prompt": prompt, "completion": completion}
    if scorer.kind == "pairwise":
        values["other"] = other
    messages = [{"role": role, "content": filled(template, values)} for role, template in scorer.templates]
    body: dict[str, Any] = {"model": scorer.model, **scorer.extra}
    if scorer.kind == "classification":
        text = isinstance(scorer.prompt, str)
        body |= {"use_activation": False} | ({"input": messages[0]["content"]} if text else {"messages": messages})
    else:
        body = {"temperature": 0, "max_tokens": scorer.max_tokens, **body, "messages": messages}
        for field in JUDGE_FIELDS:  # models that reason take neither
            if body[field] is None:
                del body[field]
    return json.dumps(body).encode()


def score_of(scorer: ScorerConfig, answer: bytes) -> Score:
    """The score in an answer. Raises ScorerFailed, with a part of the answer, where there is none."""
    try:
        return _raw(scorer, answer) if scorer.kind == "classification" else _verdict(scorer, answer)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ScorerFailed(f"{error}: {answer[:SHOWN_CHARS].decode(errors='replace')!r}") from error


def _raw(scorer: ScorerConfig, answer: bytes) -> Score:
    found = msgspec.json.decode(answer, type=_Classification)
    raw = found.data[0].probs
    if scorer.label >= len(raw):
        raise ValueError(f"the model has no label {scorer.label}, it has {len(raw)}")
    return Score(_finite(raw[scorer.label]), _said(found.model or scorer.model, ", ".join(map(str, raw))))


def _verdict(scorer: ScorerConfig, answer: bytes) -> Score:
    found = msgspec.json.decode(answer, type=_Completion)
    choice = found.choices[0]
    if choice.finish_reason == "length":  # an early thought, or a number without its end
        limit = "its limit of tokens" if "max_tokens" in scorer.extra else f"max_tokens ({scorer.max_tokens})"
        raise ValueError(f"no verdict, the answer was cut at {limit}")
    text = choice.message.content or ""
    verdict = scorer.verdict or ""
    labels = {}
    if isinstance(verdict, str):
        with _in_time(VERDICT_S):
            given = [match[1] for match in re.finditer(verdict, text)]
    else:
        labels = {label.strip().casefold(): value for label, value in verdict.items()}
        # the longest first: 'not correct' before 'correct'
        words = "|".join(re.escape(label) for label in sorted(labels, key=len, reverse=True))
        given = [match[1] for match in re.finditer(rf"(?<!\w)({words})(?!\w)", text.casefold())]
    if not given or given[-1] is None:
        raise ValueError("no verdict in the answer")
    value = labels[given[-1]] if labels else float(given[-1])
    return Score(_finite(value), _said(found.model or scorer.model, text))


def _said(model: str, answer: str) -> str:
    """The part that a transcript keeps; a cache of whole answers could take gigabytes."""
    return f"{model}: {answer}"[:NOTE_CHARS]


@contextmanager
def _in_time(limit_s: float) -> Iterator[None]:
    """Raises ValueError when a regular expression takes longer; `re` stops for signals, in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise ValueError(f"the search for `verdict` took longer than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"a score of {value}")
    return value
