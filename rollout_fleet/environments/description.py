"""Describes an environment before a node starts, from within the interpreter that will run the episodes.

That interpreter may be another one (`tasks.limits.python`) with libraries that this one lacks. Then a child process of
it imports the environment, checks it, and answers in JSON. This module needs the standard library only, because the
child runs it too: python -m rollout_fleet.environments.description NAME OPTIONS
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from rollout_fleet.environments import registry
from rollout_fleet.environments.isolation.process_host import child_variables
from rollout_fleet.environments.protocol import Limits

if TYPE_CHECKING:
    from common.config.schema import TasksConfig

CHECK_S = 300.0  # for the other interpreter to import the environment
PYTHON_KEY = "tasks.limits.python"


@dataclass(frozen=True)
class Description:
    """An environment or agent that was checked."""

    path: str  # 'module:Class'
    agent: bool  # whether it is an agent's coroutine function and no environment class
    shares_seed: bool  # whether its constructor names `group_seed`
    limits: Limits  # its class's limits, overridden by tasks.limits
    modules: tuple[str, ...]  # the fork server imports them before it forks the episodes' processes


def check_environment(tasks: "TasksConfig", file: str = "config", libraries: bool = True) -> Description:
    """Check tasks.environment and tasks.options under the interpreter that will run the episodes.

    `libraries` is False on a machine that runs no episodes, where this interpreter may lack the environment's `NEEDS`.
    Raises ConfigError for a name or options that do not fit, with the nearest valid name.
    """
    name, options, python = tasks.environment, dict(tasks.options), tasks.limits.python
    if python is None:
        found = registry.resolve(name, options, file)
        own = _described(name, found)
        python = own.limits.python
        if libraries and not python:
            registry.check_libraries(found, name, file)
    if python:
        own = _ask(python, name, options, file)
    said = {f.name: getattr(tasks.limits, f.name) for f in fields(Limits)}
    limits = replace(own.limits, **{key: value for key, value in said.items() if value is not None})
    return replace(own, limits=replace(limits, process=limits.process or bool(limits.python)))


def _described(name: str, found: Any) -> Description:
    path, limits = registry.BUILT_IN.get(name, name), getattr(found, "LIMITS", Limits())
    modules = path.partition(":")[0], *getattr(found, "PRELOAD", ())
    return Description(path, registry.is_agent(found), registry.takes_group_seed(found), limits, modules)


def _ask(python: str, name: str, options: dict[str, Any], file: str) -> Description:
    """The description by a child process of `python`; raises ConfigError when there is none."""
    command = [python, "-m", "rollout_fleet.environments.description", name, json.dumps(options)]
    expected = f"an interpreter that can import {name!r}"
    try:
        answer, log, code = _run(command)
    except OSError as error:
        raise ConfigError(file, PYTHON_KEY, expected, f"{python}, which cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        reason = f"{python}, which has not imported it after {CHECK_S:g} s"
        raise ConfigError(file, PYTHON_KEY, expected, reason) from error
    try:
        found = json.loads(answer)
    except ValueError as error:
        last = log.decode(errors="replace").strip().rpartition("\n")[2][:300]
        reason = f"{python}, which ended with exit code {code}: {last or 'it said nothing'}"
        raise ConfigError(file, PYTHON_KEY, expected, reason) from error
    if "refused" in found:
        raise ConfigError(file, *found["refused"])
    return Description(**{**found, "limits": Limits(**found["limits"]), "modules": tuple(found["modules"])})


def _run(command: list[str]) -> tuple[bytes, bytes, int]:
    """Standard output, standard error and exit code of a child without the node's secrets."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=child_variables(), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    ) as child:
        try:
            answer, log = child.communicate(timeout=CHECK_S)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)  # the import may have started more processes
    return answer, log, child.returncode


def main(name: str, options: str) -> None:
    """In the child: print the description, or why the environment is refused, as one JSON object."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # output of the import must not mix with the answer
        try:
            found = registry.resolve(name, json.loads(options))
            registry.check_libraries(found, name)
            json.dump(asdict(_described(name, found)), answer)
        except ConfigError as error:
            json.dump({"refused": [error.key, error.expected, f"{error.found} ({sys.executable})", error.hint]}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
