"""Parts of the loss that a config names by import path, 'module:function'. No torch here.

`part` finds a function. `ask` checks every import path of a job in a process of its own, before anything starts:
plugin_check.py says what is checked. The learner's ranks do the same check themselves when they start.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from common.config.loss import plugins
from common.config.schema import Config
from common.errors import ConfigError, Problem
from common.import_path import check_arguments, load

ELSEWHERE = "--elsewhere"
CHECK_S = 120.0  # torch's import and all checks; they take a few seconds
TAKES = {
    "objective": ("tokens", "config"),
    "advantage": ("groups",),
    "correction": ("log_weights", "documents", "config"),
    "reduction": ("count",),
    "kl_estimator": ("log_ratio",),
}


def part(
    kind: str,
    name: str,
    built_in: Mapping[str, Any],
    options: Mapping[str, float] | None = None,
    *,
    key: str = "",
    file: str = "config",
) -> Any:
    """The function of the part `kind` with its options bound; `key` names it in the config, by default as in the loss.

    Raises ConfigError for an import path that leads nowhere, and for arguments or options that do not fit.
    """
    key = key or f"learner.loss.{kind}"
    found = built_in.get(name)
    if found is None:
        expected = f"one of {', '.join(built_in)}, or 'module:function'" if built_in else "'module:function'"
        found = load(name, built_in={}, file=file, key=key, expected=expected)
        if not callable(found):
            raise ConfigError(file, key, expected, f"{name!r}, which is a {type(found).__name__}")
        check_arguments(found, options or {}, TAKES[kind], (), file=file, key=f"{key}_options" if options else key)
    return partial(found, **options) if options else found


def can_check() -> bool:
    """Whether this Python has what the checks of parts need."""
    return importlib.util.find_spec("torch") is not None


def ask(config: Config, *, elsewhere: bool = False) -> list[Problem]:
    """The problems of the parts that `config` names by import path, found by a process of their own; [] without torch.

    The learner, whose Python has torch, checks them again. `elsewhere`: it is another Python, so what cannot be
    imported here is left to it.
    """
    if not plugins(config) or not can_check():
        return []
    command = [sys.executable, "-P", "-m", "learner.loss.plugin_check", *[ELSEWHERE] * elsewhere]
    told = msgspec.json.encode(config)
    key = next(iter(plugins(config)))
    try:
        done = subprocess.run(command, input=told, stdout=subprocess.PIPE, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        return [Problem(key, f"a check that ends within {CHECK_S:g} s", "one that does not")]
    try:
        return msgspec.json.decode(done.stdout, type=list[Problem])
    except msgspec.DecodeError:
        return [Problem(key, "a part that can be checked", f"a check that ends with exit code {done.returncode}")]
