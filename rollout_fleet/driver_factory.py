"""From a config to an episode driver."""

import asyncio
import sys
from collections.abc import Iterable
from contextlib import closing, redirect_stdout, suppress
from typing import Any

import msgspec

from common.config.schema import Config
from common.config.tasks import PENALTY
from common.errors import ConfigError, meant, of_source
from common.hub import load_tokenizer
from common.json_lines import FIRST_ROWS, first_row, first_rows
from rollout_fleet.environments import registry
from rollout_fleet.environments.description import Description, check_environment
from rollout_fleet.environments.isolation.backend import Backend, BackendFailed
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread, ThreadBackend
from rollout_fleet.environments.protocol import Action, Budget, Chat
from rollout_fleet.episode.driver import (
    EpisodeDriver,
    EpisodeFailed,
    EpisodeRules,
    Sampling,
    bounded,
    check_penalty,
    checked_metrics,
    finite,
)
from rollout_fleet.episode.rendering import Renderer, token_of
from rollout_fleet.episode.sampler_protocol import Sampler

# Reward functions judge these before a launch: a sentence, and the answer of a policy that ends its turn at once.
MADE_UP = ("The answer is 42.", "")
PAIRS = 'messages are Chat((("user", text), ...))'


def build_drivers(config: Config, sampler: Sampler, thread: EnvironmentThread) -> dict[str, EpisodeDriver]:
    """The driver of each source. They share the tokenizer, the job's teacher, and the clients of scorers.

    Raises as `build_driver`.
    """
    clients = dict[str, Any]()
    renderers = dict[str, Renderer]()
    drivers = dict[str, EpisodeDriver]()
    for name, job in config.sources.items():
        with of_source(name):
            drivers[name] = build_driver(job, sampler, thread, clients=clients, renderers=renderers)
    if config.learner.loss.distillation is not None:
        from rollout_fleet.scorers.teacher import Teacher

        teacher = Teacher.of(config, config.learner.loss.distillation)
        for driver in drivers.values():
            driver.teacher = teacher
    return drivers


def build_driver(
    config: Config,
    sampler: Sampler,
    thread: EnvironmentThread,
    sampling: Sampling | None = None,
    *,
    clients: dict[str, Any] | None = None,
    renderers: dict[str, Renderer] | None = None,
) -> EpisodeDriver:
    """The driver of the environment and budgets of a config with one source, over an engine that may start later.

    `sampling`: None stands for the config's. `clients`, `renderers`: scorers' and, by model.path, models'
    that exist already; new ones are added. Raises UsageError for an unusable environment, option or tokenizer, and for
    a prompt of tasks.reward, or variables, that do not fit the model's chat template.
    """
    rollout = config.rollout
    found = check_environment(config.tasks)
    renderers = {} if renderers is None else renderers
    if (renderer := renderers.get(config.model.path)) is None:
        renderer = renderers[config.model.path] = Renderer(load_tokenizer(config.model.path))
    if config.tasks.reward is not None:
        _check_template(config, renderer)
    budget = Budget(rollout.max_turns, rollout.max_tokens, rollout.engine.max_model_len)
    job = Sampling(rollout.temperature, rollout.top_p)
    rules = EpisodeRules(
        budget,
        sampling or job,
        rollout.sample_timeout_s,
        found.limits,
        job,
        penalty_tokens=config.tasks.penalty_tokens(rollout.max_tokens),
        same_metrics=config.tasks.reward is not None,
        taught=config.learner.loss.distillation is not None,
        agents={name: agent.trained for name, agent in config.tasks.agents.items()},
    )
    backend = _backend(config, found, thread)
    if found.agent:
        from rollout_fleet.agents.driver import AgentDriver

        return AgentDriver(sampler, renderer, backend, rules)
    if any(scorer.kind != "teacher" for scorer in config.scorers.values()):
        from rollout_fleet.scorers.driver import ScoredDriver

        return ScoredDriver(sampler, renderer, backend, rules=rules, config=config, clients=clients)
    return EpisodeDriver(sampler, renderer, backend, rules)


def _backend(config: Config, found: Description, thread: EnvironmentThread) -> Backend:
    """Runs the config's environments: on `thread`, or in processes."""
    name, options = registry.played(config.tasks)
    if not found.limits.process:
        return ThreadBackend(registry.resolve(name), options, thread)
    processes = ProcessHost(found.modules, found.limits.python or sys.executable)
    timeout_s = config.rollout.sample_timeout_s
    return ProcessBackend(found.path, options, found.limits, timeout_s, processes, found.shares_seed)


def _check_template(config: Config, renderer: Renderer) -> None:
    """Raise ConfigError for variables that no chat template reads, and where it does not render the first row's prompt.

    Not among a launch's first checks: transformers takes seconds, and a node imports it anyway.
    """
    options = config.tasks.chat_template_kwargs
    if (first := first_row(config.tasks.dataset)) is not None:
        _check_rendering(config, renderer, *first)
    found = getattr(renderer.tokenizer, "chat_template", None)
    if options and found and "chat_template" not in options:
        _check_variables(config, [found] if isinstance(found, str) else found.values())


def _check_rendering(config: Config, renderer: Renderer, where: str, line: bytes) -> None:
    from rollout_fleet.environments.builtin.reward_function import messages_of

    try:
        prompt = registry.played(config.tasks)[1]["prompt"]
        messages = tuple(messages_of(prompt, msgspec.json.decode(line, type=dict[str, Any])))
    except ValueError:  # check_rows says it
        return
    try:
        renderer.ids(Chat(messages, tuple(config.tasks.chat_template_kwargs.items())))
    except Exception as error:  # a template raises anything
        expected = "messages that the model's chat template renders"
        raise ConfigError("config", "tasks.prompt", expected, f"{where}: {type(error).__name__}: {error}") from error


def _check_variables(config: Config, templates: Iterable[str]) -> None:
    from jinja2 import Environment, TemplateError

    with suppress(TemplateError):  # the first row's prompt shows it
        # all names, which are more than the variables: a parser would need the tags that transformers adds
        tokens = [token for template in templates for token in Environment().lex(template)]
        names = {value for _, kind, value in tokens if kind == "name"}
        for name in sorted(config.tasks.chat_template_kwargs.keys() - names):
            expected = f"variables of the chat template of {config.model.path}"
            hint = meant(name, names, "the template would ignore it")
            raise ConfigError("config", "tasks.chat_template_kwargs", expected, repr(name), hint)


def check_prompts(config: Config, file: str) -> tuple[str, dict[str, Any]] | None:
    """('PATH line N', row) of the dataset's first row, after tasks.prompt was filled from the first ones.

    None where the dataset cannot be read: the config's checks say so, or it is on another machine or of the hub.
    Raises ConfigError, naming the row, for a template that does not fit.
    """
    from rollout_fleet.environments.builtin.reward_function import check_filled, messages_of

    first = None
    rewards = config.tasks.reward is not None
    prompt: Any = registry.played(config.tasks)[1]["prompt"] if rewards else None
    for where, line in first_rows(config.tasks.dataset, FIRST_ROWS if rewards else 1):
        row = msgspec.json.decode(line, type=dict[str, Any])
        first = first or (where, row)
        try:
            list(messages_of(prompt, row) if rewards else ())
            if prompt is not None:
                check_filled(prompt, row)
        except ValueError as error:
            expected = "a template with {column}, whose columns are in each row, or rows with the column 'prompt'"
            raise ConfigError(file, "tasks.prompt", expected, f"{where}: {error}") from error
    return first


def check_rows(config: Config, found: Description, file: str) -> frozenset[str]:
    """Try tasks.prompt on the first rows of the dataset and an episode on the first, where they can be read here.

    Returns the names of a sample's metrics; none where only the run knows them. Raises ConfigError, naming the row, as
    `check_prompts`, and where a sample of the first row would fail.
    """
    if (first := check_prompts(config, file)) is None:
        return frozenset()
    where, row = first
    try:
        names = try_episode(config, found, row)
    except (EpisodeFailed, BackendFailed) as error:
        key, expected = "tasks.environment", "an environment that begins on the dataset's rows"
        if config.tasks.reward is not None:
            key, expected = "tasks.reward", "functions that judge any completion of the dataset's rows"
        raise ConfigError(file, key, expected, f"{where}: {error}") from error
    if config.scorers or not names:  # scorers and environments have names of their own
        return frozenset()
    return names | {PENALTY} if config.tasks.truncated == "penalized" else names


def check_names(config: Config, source: str, names: frozenset[str], file: str) -> None:
    """Raise ConfigError where `watch`, or gdpo in a job of one source, names a reward that is not among a source's.

    `names`: of `check_rows`, of the `source` in tasks.sources; '' is the only one.
    """
    at = f"environment/{source}/" if source else "environment/"
    asked = {f"watch[{number}].metric": [rule.metric] for number, rule in enumerate(config.watch)}
    if config.learner.loss.advantage == "gdpo" and not source:
        asked["learner.loss.advantage_options"] = [at + name for name in config.learner.loss.advantage_options]
    for key, metrics in asked.items():
        for name in (metric.removeprefix(at) for metric in metrics if metric.startswith(at)):
            if names and name not in names:
                hint = meant(name, names, f"they are {', '.join(sorted(names))}")
                raise ConfigError(file, key, "a name of the job's rewards", repr(name), hint)


def try_episode(config: Config, found: Description, row: dict[str, Any]) -> frozenset[str]:
    """Build and reset the environment of a dataset row where an episode would run, and within its limits.

    Reward functions also judge the completions MADE_UP. Returns their names. Raises EpisodeFailed with the reason why a
    sample would fail, BackendFailed when no environment can be started.
    """
    thread = EnvironmentThread()
    try:
        with redirect_stdout(sys.stderr):  # the command's output is not for environments
            observation, names = asyncio.run(_first_observation(config, found, row, thread))
    finally:
        thread.close(keep_loop=True)  # a node of this process plays with the same clients
    if not isinstance(observation, str | list | Chat):
        raise EpisodeFailed(f"reset returned {type(observation).__name__}, expected a text, token ids or a Chat")
    try:
        for each in observation if isinstance(observation, list) else ():
            token_of(each)
    except ValueError as error:
        raise EpisodeFailed(f"reset returned a list: {error}; {PAIRS}") from error
    return names


async def _first_observation(
    config: Config, found: Description, problem: dict[str, Any], thread: EnvironmentThread
) -> tuple[object, frozenset[str]]:
    names = set[frozenset[str]]()
    with closing(_backend(config, found, thread)) as backend:
        environment = backend.environment(problem, config.run.seed, config.run.seed)
        try:
            async with bounded("reset", found.limits.reset_s):
                observation = await environment.reset()
            for text in MADE_UP if config.tasks.reward is not None else ():
                async with bounded(f"judging {text!r}", found.limits.step_s):
                    result = await environment.step(Action(text, tokens=tuple(range(len(text) + 1)), ended=True))
                finite(result.reward)
                names.add(frozenset(checked_metrics(result.metrics)))
        finally:
            await environment.close()
    if config.tasks.truncated == "penalized":
        check_penalty(frozenset().union(*names))
    if len(names) > 1:
        raise EpisodeFailed(f"names of rewards change from one completion to the next: {[*map(sorted, names)]}")
    return observation, frozenset().union(*names)
