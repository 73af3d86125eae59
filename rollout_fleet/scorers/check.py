"""A launch's look at the scorers: their templates on a row of the dataset, and a few cheap requests to each."""

import http.client
import json
import os
import urllib.error
from collections.abc import Iterator
from typing import Any

import msgspec

from common.config.schema import Config
from common.config.scorers import ScorerConfig
from common.errors import ConfigError, nearest
from common.json_lines import first_row
from rollout_fleet.environments.builtin.reward_function import messages_of
from rollout_fleet.environments.protocol import Chat
from rollout_fleet.environments.registry import played
from rollout_fleet.scorers.requests import ScorerFailed, address_of, asked, body_of, score_of, text_of_prompt

MADE_UP = "The answer is 42."


def check_scorers(config: Config, file: str) -> Iterator[str]:
    """Sentences on scorers that do not answer yet, which may come later.

    Raises ConfigError for a template that does not fit the dataset's first row. It does so, too, for a model that is
    not served there, and for a label that the model lacks.
    """
    for name, scorer in config.scorers.items():
        if scorer.kind == "teacher":
            from rollout_fleet.scorers.teacher_check import check_teacher  # which asks as this module does

            said = check_teacher(config, name, file)
        else:
            said = look(name, scorer, body=_body(config, name, file), file=file)
        if said:
            yield f"scorers.{name}: {scorer.url} {said}; samples fail until it answers"


def _body(config: Config, name: str, file: str) -> bytes:
    """A request of the scorer by the first row of a source that uses it; all of them are tried. b'' without rows."""
    body = b""
    for job in config.sources.values():
        row = first_row(job.tasks.dataset) if name in job.scorers else None
        if row is None:  # said by the config's checks, or on another machine
            continue
        where, line = row
        problem = msgspec.json.decode(line, type=dict[str, Any])
        try:
            prompt = text_of_prompt(Chat(tuple(messages_of(played(job.tasks)[1]["prompt"], problem))))
            body = body_of(job.scorers[name], problem, prompt=prompt, completion=MADE_UP, other=MADE_UP)
        except ValueError as error:
            expected = "templates whose columns are in the dataset"
            raise ConfigError(file, f"scorers.{name}.prompt", expected, f"{where}: {error}") from error
    return body


def look(name: str, scorer: ScorerConfig, *, body: bytes, file: str, longest: int = 0) -> str:
    """Why it does not answer; '' when all is well, or when it does not list its models.

    `longest`: tokens of the longest request, with the token that is sampled.
    """
    try:
        listed = json.loads(request(scorer, f"{scorer.url.rstrip('/')}/models"))
        served = {str(entry["id"]): entry.get("max_model_len") for entry in listed["data"]}
    except urllib.error.HTTPError as error:
        return f"refuses the key (HTTP {error.code})" if error.code in (401, 403) else ""
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer: {getattr(error, 'reason', error)}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    if served and scorer.model not in served:
        near = nearest(scorer.model, served)
        hint = f"did you mean '{near}'?" if near else None
        expected = f"a model that {scorer.url} serves ({', '.join([*served][:8])})"
        raise ConfigError(file, f"scorers.{name}.model", expected, scorer.model, hint)
    if isinstance(room := served.get(scorer.model), int) and room < longest:
        expected = f"a context of rollout.engine.max_model_len + 1 ({longest})"
        raise ConfigError(file, f"scorers.{name}.model", expected, f"{scorer.model} with {room}")
    if scorer.kind == "classification" and body:
        try:
            score_of(scorer, request(scorer, address_of(scorer), body))
        except (OSError, http.client.HTTPException) as error:
            return f"does not classify: {error}"
        except ScorerFailed as error:
            raise ConfigError(file, f"scorers.{name}.label", "a label with a raw score", str(error)) from error
    return ""


def request(scorer: ScorerConfig, url: str, body: bytes | None = None) -> bytes:
    """The answer to a GET, or to a POST of `body`, with the scorer's key; raises as urlopen."""
    return asked(url, body, key=os.environ.get(scorer.api_key_env, "") if scorer.api_key_env else "")
