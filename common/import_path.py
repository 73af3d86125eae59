"""Objects that a config names by import path: environments, rewards, parts of the loss. The standard library only."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import ConfigError


def load(name: str, *, built_in: Mapping[str, str], file: str, key: str, expected: str) -> Any:
    """The object that `key` names: 'module:NAME' of any importable module, or one of `built_in`.

    The working directory is searched as well, so that a module may live beside the config's job. Raises ConfigError
    for an unknown name, with the nearest valid one.
    """
    path = built_in.get(name, name)
    if ":" not in path:
        near = difflib.get_close_matches(name, built_in, 1, 0.0)
        hint = f"nearest built-in: {near[0]!r} (built in are {', '.join(built_in)})" if near else None
        raise ConfigError(file, key, expected, repr(name), hint)
    module_name, _, wanted = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        reason = f"{name!r}, which does not import: {type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = f"start where {module_name.replace('.', '/')}.py lies, or install it" if absent else None
        raise ConfigError(file, key, expected, reason, hint) from error
    found = getattr(module, wanted, None)
    if found is None:
        reason = f"{name!r}: module {module_name!r} has no {wanted!r}"
        near = difflib.get_close_matches(wanted, [n for n in vars(module) if not n.startswith("_")], 1)
        raise ConfigError(file, key, expected, reason, f"did you mean {near[0]!r}?" if near else None)
    return found


def check_arguments(
    found: Callable[..., Any],
    options: Mapping[str, Any],
    takes: Sequence[str],
    given: Sequence[str],
    *,
    file: str,
    key: str,
) -> None:
    """Raise ConfigError for `key`, with the nearest name, unless `found` takes all of these arguments.

    It is not called. `takes` are its positional arguments, `given` the keywords that are no options.
    """
    signature = inspect.signature(found)
    known = [name for name in [*signature.parameters][len(takes) :] if name not in given]
    try:
        signature.bind(*takes, **dict.fromkeys(given), **options)
    except TypeError as error:
        name = getattr(found, "__name__", type(found).__name__)
        unknown = next((o for o in options if o not in known), None)
        lacks = [p for p in known if p not in options and signature.parameters[p].default is inspect.Parameter.empty]
        hint = f"give the option {lacks[0]!r}" if lacks else f"it is called with {', '.join((*takes, *given))}"
        if unknown is not None:
            near = difflib.get_close_matches(unknown, known, 1, 0.0)
            hint = f"did you mean {near[0]!r}?" if near else f"{name} takes no options"
        expected = f"options of {name} ({', '.join(known) or 'none'})"
        raise ConfigError(file, key, expected, f"{dict(options)}: {error}", hint) from error
