"""The section `scorers` of the config: judges, reward models and teachers behind an HTTP endpoint; docs/scorers.md."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from common.config.loss_keys import DistillationConfig
from common.config.tasks import MessageConfig, TasksConfig
from common.config.types import Natural, Number, Positive, Scalar, Seconds, Strict, Text
from common.errors import Problem, meant

NAME = re.compile(r"[A-Za-z][\w-]*")
ENDPOINT = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[^\s?#]*)?")
PLACE = "{completion}"
OTHER = "{other}"
OPERATION = (  # keys that change no score
    "url", "api_key_env", "concurrency", "requests_per_minute", "timeout_s", "deadline_s", "retries", "cache",
    "failures", "serve", "tokenizer",
)  # fmt: skip
OWN_FIELDS = (
    "model", "messages", "input", "n", "stream", "use_activation", "prompt",
    "prompt_logprobs", "echo",
)  # fmt: skip
JUDGE_FIELDS = ("temperature", "max_tokens")  # by null in `extra` a judge gets none
TEACHER_LIMIT = 20  # vLLM's max_logprobs


class ScorerConfig(Strict, frozen=True, kw_only=True):
    url: Text  # OpenAI-compatible endpoint, such as http://HOST:8000/v1.
    model: Text  # Name of the model there.
    # A rubric asks the model and reads a verdict out of its answer; pairwise compares answers of a group so. A
    # classification takes the raw score of a reward model from vLLM's /classify. A teacher gives no score but
    # log-probabilities of the policy's tokens; docs/distillation.md.
    kind: Literal["rubric", "classification", "pairwise", "teacher"] = "rubric"
    # The request's text: a template with {completion}, {prompt} and {column}, or messages with such templates. For
    # pairwise also {other}, the other answer. A teacher has none.
    prompt: Text | list[MessageConfig] | None = None
    # Regular expression whose one group is the score, or labels and their scores; the last match counts. For rubric.
    verdict: Text | dict[str, Number] | None = None
    opponents: Positive = 2  # Most other answers of its group that an answer is compared with. For pairwise.
    label: Natural = 0  # Index of the label whose raw score counts. For classification.
    max_tokens: Positive = 512  # Tokens of the answer. Raise it for a judge that reasons. For rubric.
    extra: dict[str, Any] = {}  # More fields of the request. temperature replaces 0; null leaves it or max_tokens out.
    # Options of `vllm serve` for `slipstream scorer`, such as max_model_len; `model` is the folder if it differs.
    serve: dict[str, Scalar] = {}
    # Folder with a teacher's tokenizer, to compare it with the policy's. Unset, the folder that `slipstream scorer`
    # serves, if it is here.
    tokenizer: Text | None = None
    api_key_env: Text | None = None  # Variable of the node's environment that has the API key.
    concurrency: Positive = 16  # Requests at once, of each node.
    requests_per_minute: Positive | None = None  # Limit of each node. Unset, there is none.
    timeout_s: Seconds = 30.0  # Longest duration of one request.
    deadline_s: Seconds = 120.0  # Longest duration of one score, with all waits and retries.
    retries: Natural = 5  # Further requests after 429, 5xx, a timeout or a lost connection.
    cache: Natural = 4096  # Scores that a node remembers; 0 turns it off.
    failures: Positive = 16  # Failed scores in a row after which a node takes no more tasks until the scorer answers.

    @property
    def templates(self) -> list[tuple[str, str]]:
        """(role, template) of its messages."""
        if isinstance(self.prompt, str):
            return [("user", self.prompt)]
        return [(message.role, message.content) for message in self.prompt or ()]

    @property
    def problem_of_key(self) -> str:
        """The variable of the API key if it is not set here; '' otherwise."""
        return "" if self.api_key_env is None or os.environ.get(self.api_key_env) else self.api_key_env


def scorer_problems(
    scorers: Mapping[str, ScorerConfig], tasks: TasksConfig, *, sample_s: float, group_size: int
) -> Iterator[Problem]:
    """Scorers that cannot work, and rewards that name none of them; `sample_s` is rollout.sample_timeout_s."""
    for name, scorer in scorers.items():
        at = f"scorers.{name}"
        if not NAME.fullmatch(name):
            yield Problem("scorers", "names of letters, digits, - and _", repr(name))
        yield from _endpoint(at, scorer)
        places = {"pairwise": (PLACE, OTHER), "teacher": ()}
        for place in places.get(scorer.kind, (PLACE,)):
            if scorer.prompt is None:
                yield Problem(f"{at}.prompt", f"a template with {place}, which is required", "none")
            elif not any(_has(template, place) for _, template in scorer.templates):
                yield Problem(f"{at}.prompt", f"a template with {place}", "none", "the score could not depend on it")
        if scorer.kind == "pairwise" and group_size == 1:
            yield Problem(f"{at}.kind", "another one with rollout.group_size: 1", "pairwise")
        yield from _verdict(at, scorer)
        yield from _extra(at, scorer)
        if scorer.timeout_s > scorer.deadline_s:
            yield Problem(f"{at}.timeout_s", f"at most deadline_s ({scorer.deadline_s:g})", f"{scorer.timeout_s:g}")
        if scorer.deadline_s >= sample_s:
            expected = f"less than rollout.sample_timeout_s ({sample_s:g})"
            yield Problem(f"{at}.deadline_s", expected, f"{scorer.deadline_s:g}")
    yield from _named(scorers, tasks)


def _has(template: str, place: str) -> bool:
    """Whether the place is filled; with two braces on each side it stands for itself."""
    shown = re.escape(place)
    return re.search(rf"(?<!{{){shown}|{shown}(?!}})", template) is not None


def _endpoint(at: str, scorer: ScorerConfig) -> Iterator[Problem]:
    expected = "an endpoint such as http://HOST:8000/v1"
    if "@" in scorer.url:
        yield Problem(f"{at}.url", expected, "one with a password", "name a variable with it: api_key_env")
    elif not ENDPOINT.fullmatch(scorer.url):
        yield Problem(f"{at}.url", expected, scorer.url, None if "://" in scorer.url else f"http://{scorer.url}?")


def _extra(at: str, scorer: ScorerConfig) -> Iterator[Problem]:
    judge = scorer.kind in ("rubric", "pairwise")
    for field in sorted(scorer.extra.keys() & {*OWN_FIELDS, *(() if judge else JUDGE_FIELDS)}):
        yield Problem(f"{at}.extra.{field}", "fields that the fleet does not set itself", field)
    for field in JUDGE_FIELDS if judge else ():
        found = scorer.extra.get(field)
        if field == "max_tokens" and found is not None:
            hint = f"the number is {at}.max_tokens"
            yield Problem(f"{at}.extra.{field}", "null, which leaves it out", str(found), hint)
        elif found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            yield Problem(f"{at}.extra.{field}", "a number, or null, which leaves it out", repr(found))


def _verdict(at: str, scorer: ScorerConfig) -> Iterator[Problem]:
    verdict = scorer.verdict
    key = f"{at}.verdict"
    expected = "a regular expression with one group, or labels with their scores"
    if scorer.kind in ("classification", "teacher"):
        if verdict is not None:
            hint = "`label` says which raw score counts" if scorer.kind == "classification" else None
            yield Problem(key, f"nothing with kind: {scorer.kind}", "a verdict", hint)
    elif isinstance(verdict, str):
        try:
            if (groups := re.compile(verdict).groups) != 1:
                yield Problem(
                    key, expected, f"{groups} groups in {verdict!r}", "(?:...) is a group that does not count"
                )
        except re.error as error:
            yield Problem(key, expected, f"{verdict!r}: {error}")
    elif not verdict:
        yield Problem(key, expected, "none")
    elif len({label.casefold().strip() for label in verdict} - {""}) < len(verdict):
        yield Problem(key, "labels that differ by more than their case", ", ".join(map(repr, verdict)))


def teacher_problems(scorers: Mapping[str, ScorerConfig], told: DistillationConfig | None) -> Iterator[Problem]:
    """A teacher that is unknown or cannot do what the loss asks, and teachers that the loss does not name."""
    if told is not None:
        yield from _told(scorers, told)
    for name, scorer in scorers.items():
        if scorer.kind == "teacher":
            if scorer.prompt is not None:
                yield Problem(f"scorers.{name}.prompt", "nothing with kind: teacher", "a prompt")
            if told is None or told.teacher != name:
                yield Problem(f"scorers.{name}", "learner.loss.distillation.teacher that names it", "none")
        elif scorer.tokenizer is not None:
            yield Problem(f"scorers.{name}.tokenizer", f"nothing with kind: {scorer.kind}", scorer.tokenizer)


def _told(scorers: Mapping[str, ScorerConfig], told: DistillationConfig) -> Iterator[Problem]:
    key = "learner.loss.distillation"
    found = scorers.get(told.teacher)
    if found is None:
        yield Problem(f"{key}.teacher", "the name of one of `scorers`", told.teacher, _nearest(told.teacher, scorers))
    elif found.kind != "teacher":
        yield Problem(f"{key}.teacher", "a scorer of kind: teacher", f"{told.teacher}, of kind: {found.kind}")
    elif found.serve:
        limit = found.serve.get("max_logprobs", TEACHER_LIMIT)
        if isinstance(limit, int) and -1 < limit < told.wanted:
            hint = f"scorers.{told.teacher}.serve.max_logprobs raises it"
            yield Problem(f"{key}.top_k", f"at most {limit}, the teacher's limit", str(told.wanted), hint)
    if told.top_k is not None and not told.wanted:
        yield Problem(f"{key}.top_k", f"unset with objective: {told.objective}", str(told.top_k))


def _nearest(name: str, scorers: Mapping[str, ScorerConfig]) -> str:
    return meant(name, scorers, f"scorers has {', '.join(scorers) or 'none'}")


def _named(scorers: Mapping[str, ScorerConfig], tasks: TasksConfig) -> Iterator[Problem]:
    """Rewards that name no scorer or an unknown one, and scorers that no reward names."""
    used = set[str]()
    key = "tasks"
    for key, part in tasks.parts.items():
        yield from _named_by(key, part, scorers)
        used |= scorers_of(part)
    for name, scorer in scorers.items():
        if name not in used and scorer.kind != "teacher":
            hint = f"{key}.reward: [{{scorer: {name}}}]; weight: 0 only logs its score"
            yield Problem(f"scorers.{name}", "a reward that names it", "none", hint)


def scorers_of(tasks: TasksConfig) -> set[str]:
    rewards = tasks.reward if isinstance(tasks.reward, list) else ()
    return {entry.scorer for entry in rewards if entry.scorer is not None}


def _named_by(key: str, tasks: TasksConfig, scorers: Mapping[str, ScorerConfig]) -> Iterator[Problem]:
    names = set[str]()
    for number, entry in enumerate(tasks.reward if isinstance(tasks.reward, list) else ()):
        at = f"{key}.reward[{number}]"
        if (entry.function is None) == (entry.scorer is None):
            found = "neither" if entry.function is None else "both"
            yield Problem(at, "either `function` or `scorer`", found)
        if entry.scorer is None:
            continue
        if entry.scorer not in scorers:
            hint = _nearest(entry.scorer, scorers)
            yield Problem(f"{at}.scorer", "the name of one of `scorers`", entry.scorer, hint)
        elif scorers[entry.scorer].kind == "teacher":
            hint = "learner.loss.distillation learns from it"
            yield Problem(f"{at}.scorer", "a scorer that gives scores", f"{entry.scorer}, a teacher", hint)
        if isinstance(entry.weight, dict):
            yield Problem(f"{at}.weight", "a number with `scorer`", "a mapping")
        if entry.options:
            yield Problem(f"{at}.options", "nothing with `scorer`", ", ".join(entry.options))
        name = entry.name or entry.scorer
        if name in names:
            yield Problem(f"{at}.name", "another name for each use of a scorer", name)
        names.add(name)
