"""Checks an environment before a node starts, within the interpreter that will run the episodes, and describes it.

That interpreter may be another one (`tasks.limits.python`) with libraries that this one lacks. Then a child process of
it imports the environment, checks it, and answers in JSON. This module needs the standard library only, because the
child runs it too: python -m rollout_fleet.environments.description NAME OPTIONS
"""

import contextlib
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError, Problem, of_source
from common.import_path import check_arguments
from rollout_fleet.environments.isolation.backend import takes_group_seed
from rollout_fleet.environments.isolation.process_backend import child_variables
from rollout_fleet.environments.protocol import Limits
from rollout_fleet.environments.registry import BUILT_IN, KEY, REWARD_FUNCTION, played, resolve

if TYPE_CHECKING:
    from common.config.schema import Config, TasksConfig

CHECK_S = 300.0  # for the other interpreter to import the environment
PYTHON_KEY = "tasks.limits.python"
OF_A_PROCESS = ("cpu_s", "memory_mib")  # limits that an environment on the node's own thread cannot have
AGENT_KEYWORDS = ("base_url", "api_key", "model", "seed")
AGENT = f"async def agent(problem, *, {', '.join(AGENT_KEYWORDS)})"


@dataclass(frozen=True)
class Description:
    """An environment or agent that was checked."""

    path: str  # 'module:Class'
    agent: bool  # whether it is an agent's coroutine function and no environment class
    shares_seed: bool  # whether its constructor names `group_seed`
    limits: Limits  # its class's limits, overridden by tasks.limits
    modules: tuple[str, ...]  # the fork server imports them before it forks the episodes' processes


def check_environment(tasks: "TasksConfig", file: str = "config", libraries: bool = True) -> Description:
    """Check tasks.environment, or tasks.reward, and its options under the interpreter that will run the episodes.

    `libraries` is False on a machine that runs no episodes, where this interpreter may lack the environment's `NEEDS`.
    Raises ConfigError for a name or options that do not fit, with the nearest valid name.
    """
    own = _own_description(tasks, file, libraries)
    if tasks.agents and not own.agent:
        raise ConfigError(file, "tasks.agents", f"an agent as {KEY} ({AGENT})", f"{tasks.environment!r}, which is none")
    said = {f.name: getattr(tasks.limits, f.name) for f in fields(Limits)}
    limits = replace(own.limits, **{key: value for key, value in said.items() if value is not None})
    return replace(own, limits=replace(limits, process=limits.process or bool(limits.python)))


def limit_problems(config: "Config", found: Mapping[str, Description]) -> Iterator[Problem]:
    """Limits that nothing enforces, where `found` is by `check_sources`. A run of an earlier release may have them."""
    for (at, tasks), environment in zip(config.tasks.parts.items(), found.values(), strict=True):
        for key in () if environment.limits.process else OF_A_PROCESS:
            if (limit := getattr(tasks.limits, key)) is not None:
                hint = "without a process of its own an episode shares the node's, which has no such limit"
                yield Problem(f"{at}.limits.{key}", "limits.process: true beside it", f"{limit}", hint)


def check_sources(config: "Config", file: str = "config", libraries: bool = True) -> dict[str, Description]:
    """As `check_environment`, for each source of a job; '' names the only one."""
    found = dict[str, Description]()
    for name, job in config.sources.items():
        with of_source(name):
            found[name] = check_environment(job.tasks, file, libraries)
    return found


def _own_description(tasks: "TasksConfig", file: str, libraries: bool) -> Description:
    """The description without the config's limits."""
    name, options = played(tasks)
    python = tasks.limits.python
    if not python:
        found = describe(name, options, file)
        python = found.limits.python if python is None else ""
        if not python:
            if libraries:
                check_libraries(name, options, file)
            return found
    return _ask(python, name, options, file)


def describe(name: str, options: Mapping[str, Any], file: str = "config") -> Description:
    """Check an environment or agent within this interpreter, but for its libraries; raises as check_environment."""
    found = resolve(name, file)
    agent = inspect.iscoroutinefunction(found)  # an agent's: rollout_fleet/agents/driver.py
    _check_shape(found, name, file)
    shares_seed = takes_group_seed(found)
    given = (*(AGENT_KEYWORDS if agent else ("seed",)), *["group_seed"] * shares_seed)
    check_arguments(found, options, ("problem",), given, file=file, key="tasks.options")
    if name == REWARD_FUNCTION:
        found.needs(options["reward"], options["options"], file)
    path = BUILT_IN.get(name, name)
    return Description(
        path=path,
        agent=agent,
        shares_seed=shares_seed,
        limits=getattr(found, "LIMITS", Limits()),
        modules=(path.partition(":")[0], *getattr(found, "PRELOAD", ())),
    )


def _check_shape(found: object, name: str, file: str) -> None:
    """Raise ConfigError for anything but an environment class or an agent's coroutine function."""
    limits = getattr(found, "LIMITS", Limits())
    modules = getattr(found, "PRELOAD", ())
    if not isinstance(limits, Limits):
        raise ConfigError(file, KEY, "Limits(...) as LIMITS", f"{name!r} with {limits!r}"[:200])
    if not isinstance(modules, tuple | list) or not all(isinstance(module, str) for module in modules):
        raise ConfigError(file, KEY, "names of modules as PRELOAD", f"{name!r} with {modules!r}"[:200])
    if inspect.iscoroutinefunction(found) and _takes(found, AGENT_KEYWORDS):
        return
    if not inspect.isclass(found):
        reason = f"{name!r}, which is a {type(found).__name__}"
        hint = f"a function that judges an answer is a `tasks.reward: {name}`; docs/rewards.md" * callable(found)
        if inspect.isfunction(found) and {*AGENT_KEYWORDS} & inspect.signature(found).parameters.keys():
            reason = f"{name!r}, which is {'async ' * inspect.iscoroutinefunction(found)}def {inspect.signature(found)}"
            hint = "an agent is `async def` and takes these keywords; docs/agents.md"
        raise ConfigError(file, KEY, f"an environment class, or an agent ({AGENT})", reason, hint or None)
    for method in ("reset", "step"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise ConfigError(file, KEY, f"a class with 'async def {method}'", f"{name!r} without it")


def _takes(function: Any, keywords: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind_partial({}, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def check_libraries(name: str, options: Mapping[str, Any], file: str = "config") -> None:
    """Raise ConfigError when this interpreter lacks libraries (`NEEDS`) of the environment, or of its rewards."""
    found = resolve(name, file)
    rewards = name == REWARD_FUNCTION
    needs = found.needs(options["reward"], options["options"], file) if rewards else getattr(found, "NEEDS", ())
    lacks = [library for library in needs if importlib.util.find_spec(library) is None]
    if lacks:
        reason = f"{'a function' if rewards else repr(name)}, which needs {', '.join(lacks)}"
        expected = "libraries that are installed"
        hint = f"pip install 'slipstream-rl[environments]', or name an interpreter that has them in {PYTHON_KEY}"
        raise ConfigError(file, "tasks.reward" if rewards else KEY, expected, reason, hint)


# -------------------------------------------------------------------- under another interpreter


def _ask(python: str, name: str, options: dict[str, Any], file: str) -> Description:
    """The description by a child process of `python`; raises ConfigError when there is none."""
    command = [python, "-P", "-m", "rollout_fleet.environments.description", name, json.dumps(options)]
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
            found = describe(name, json.loads(options))
            check_libraries(name, json.loads(options))
            json.dump(asdict(found), answer)
        except ConfigError as error:
            json.dump({"refused": [error.key, error.expected, f"{error.found} ({sys.executable})", error.hint]}, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
