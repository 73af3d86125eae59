"""A launch's look at the scorers: their templates on a row of the dataset, and a few cheap requests to each.

A teacher must read token ids as the policy does, and give what the loss asks for. A folder with the teacher's tokenizer
is compared with the policy's. Elsewhere the server's own /tokenize is, if it answers. Then the server is asked about a
few tokens as in the job.
"""

import http.client
import json
import os
import urllib.error
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.config.loss_keys import DistillationConfig
from common.config.schema import Config
from common.config.scorers import ScorerConfig
from common.errors import ConfigError, UsageError, nearest
from common.hub import load_tokenizer
from common.json_lines import first_row
from rollout_fleet.environments.builtin.reward_function import messages_of
from rollout_fleet.environments.protocol import Chat
from rollout_fleet.environments.registry import played
from rollout_fleet.scorers.requests import (
    SHOWN_CHARS,
    ScorerFailed,
    address_of,
    asked,
    body_of,
    score_of,
    text_of_prompt,
)
from rollout_fleet.scorers.teacher_requests import question, taught, vocabulary_of

REFUSED = (400, 422)  # a request as such, whatever answer it asks about
MADE_UP = "The answer is 42."
PROBE = "Q: 384+519=? A: 903. Why? Because it is."
TALK = [{"role": "user", "content": PROBE}]


def check_scorers(config: Config, file: str) -> Iterator[str]:
    """Sentences on scorers that do not answer yet, which may come later.

    Raises ConfigError for a template that does not fit the dataset's first row. It does so, too, for a model that is
    not served there, a label that the model lacks, and a request that a judge refuses.
    """
    for name, scorer in config.scorers.items():
        if scorer.kind == "teacher":
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
    elif scorer.kind != "teacher" and body:
        return _judged(name, scorer, body=body, file=file)
    return ""


def _judged(name: str, scorer: ScorerConfig, *, body: bytes, file: str) -> str:
    """As `look`, of one request of a judge; one that takes longer than this look may be well."""
    try:
        request(scorer, address_of(scorer), body)
    except urllib.error.HTTPError as error:
        key = _key_of(scorer)
        with error:
            said = f"HTTP {error.code}: {error.read(SHOWN_CHARS).decode(errors='replace')}"
        said = said.replace(key, "***") if key else said
        if error.code not in REFUSED:
            return f"does not judge: {said}"
        expected = f"a request that {scorer.url} takes"
        hint = "extra.temperature replaces 0; null there leaves temperature or max_tokens out"
        raise ConfigError(file, f"scorers.{name}", expected, said, hint) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, TimeoutError) else f"does not judge: {reason}"
    return ""


def request(scorer: ScorerConfig, url: str, body: bytes | None = None) -> bytes:
    """The answer to a GET, or to a POST of `body`, with the scorer's key; raises as urlopen."""
    return asked(url, body, key=_key_of(scorer))


def _key_of(scorer: ScorerConfig) -> str:
    return os.environ.get(scorer.api_key_env, "") if scorer.api_key_env else ""


def check_teacher(config: Config, name: str, file: str) -> str:
    """Why the teacher does not answer; '' when all is well.

    Raises ConfigError for another tokenizer, end of sequence or chat template than the policy's. It does so, too, for a
    model that is not served there, a context that is too short, and more tokens than the teacher gives.
    """
    scorer = config.scorers[name]
    told = config.learner.loss.distillation
    assert told is not None
    folder = scorer.tokenizer or str(scorer.serve.get("model", scorer.model))
    if scorer.tokenizer is not None and not Path(folder).is_dir():
        raise ConfigError(file, f"scorers.{name}.tokenizer", "a folder with a tokenizer", folder)
    if Path(folder).is_dir():
        try:
            theirs = load_tokenizer(folder)
        except UsageError as error:  # which names the policy's key
            key = f"scorers.{name}.{'serve' if scorer.tokenizer is None else 'tokenizer'}"
            raise ConfigError(file, key, "a folder with a tokenizer", folder) from error
        for what in _differences(Path(config.model.path), Path(folder), theirs):
            raise _other(file, name, what, folder)
    longest = config.rollout.engine.max_model_len + 1
    if said := look(name, scorer, body=b"", file=file, longest=longest):
        return said
    try:
        return _asked(scorer, told, config=config, name=name, file=file)
    except (OSError, http.client.HTTPException) as error:
        return f"does not give log-probabilities: {error}"


def _other(file: str, name: str, what: str, where: str) -> ConfigError:
    hint = "a teacher judges the policy's own token ids, so both must read and end them alike"
    return ConfigError(file, f"scorers.{name}", f"a teacher with the policy's {what}", f"another one: {where}", hint)


def _differences(policy: Path, teacher: Path, theirs: Any) -> Iterator[str]:
    """The parts of a teacher's folder, whose tokenizer is `theirs`, that are not the policy's."""
    ours = load_tokenizer(policy)
    if ours.get_vocab() != theirs.get_vocab():
        yield "vocabulary"
    if ours.eos_token_id != theirs.eos_token_id or _ends(policy) != _ends(teacher):
        yield "end of sequence"
    if ours.chat_template != theirs.chat_template:
        yield "chat template"
    if _ids(ours) != _ids(theirs):
        yield "tokenizer"


def _ends(folder: Path) -> set[int]:
    """Tokens that end a sequence by generation_config.json, else by config.json; empty without these files."""
    for file in ("generation_config.json", "config.json"):
        if (folder / file).is_file():
            found = json.loads((folder / file).read_bytes()).get("eos_token_id")
            if found is not None:
                return set(found if isinstance(found, list) else [found])
    return set()


def _ids(tokenizer: Any) -> list[Sequence[int]]:
    """Token ids of PROBE, and of TALK if there is a chat template."""
    found = [tokenizer.encode(PROBE, add_special_tokens=False)]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer.encode(text, add_special_tokens=False))
    return found


def _asked(scorer: ScorerConfig, told: DistillationConfig, *, config: Config, name: str, file: str) -> str:
    """As `check_teacher`, of a server that answers. Raises OSError or HTTPException when it stops to."""
    ours = _ids(load_tokenizer(config.model.path))
    bodies = [{"prompt": PROBE, "add_special_tokens": False}, {"messages": TALK}]
    for ids, body in zip(ours, bodies, strict=False):
        theirs = _tokenized(scorer, body)
        if theirs is not None and theirs != ids:
            raise _other(file, name, "chat template" if "messages" in body else "tokenizer", scorer.url)
    tokens = list(ours[0])
    vocabulary = vocabulary_of(config.model.path)
    for top_k in dict.fromkeys((0, told.wanted)):  # a server that refuses only the second one has a lower limit
        try:
            answer = request(scorer, address_of(scorer), question(scorer, tokens, top_k))
            taught(answer, tokens=tokens, top_k=top_k, vocabulary=vocabulary)
        except urllib.error.HTTPError as error:
            if not top_k or error.code != 400:
                raise
            key = "learner.loss.distillation.top_k"
            expected = f"at most the limit of {scorer.url}, which vLLM's --max-logprobs raises"
            raise ConfigError(file, key, expected, str(top_k)) from error
        except ScorerFailed as error:
            return f"gives no log-probabilities: {error}"
    return ""


def _tokenized(scorer: ScorerConfig, body: dict[str, Any]) -> list[int] | None:
    """Token ids by vLLM's /tokenize; None where it does not answer."""
    url = f"{scorer.url.rstrip('/').removesuffix('/v1')}/tokenize"
    try:
        found = json.loads(request(scorer, url, json.dumps({"model": scorer.model, **body}).encode()))["tokens"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, list) else None
