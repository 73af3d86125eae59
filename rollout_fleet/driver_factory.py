"""From a config to an episode driver."""

import sys
from contextlib import closing
from typing import Any

from common.config.schema import Config
from common.hub import load_tokenizer
from rollout_fleet.environments import registry
from rollout_fleet.environments.description import Description, check_environment
from rollout_fleet.environments.isolation.backend import Backend
from rollout_fleet.environments.isolation.process_backend import ProcessBackend, ProcessHost
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread, ThreadBackend
from rollout_fleet.environments.protocol import Budget, Observation
from rollout_fleet.episode.driver import EpisodeDriver, EpisodeRules, Sampling, bounded
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler


def build_driver(
    config: Config, sampler: Sampler, thread: EnvironmentThread, sampling: Sampling | None = None
) -> EpisodeDriver:
    """The driver of the config's environment and budgets, over an engine that may start later.

    `sampling`: None stands for the config's. Raises UsageError for an unusable environment, option or tokenizer.
    """
    rollout = config.rollout
    found = check_environment(config.tasks)
    renderer = Renderer(load_tokenizer(config.model.path))
    budget = Budget(rollout.max_turns, rollout.max_tokens, rollout.engine.max_model_len)
    job = Sampling(rollout.temperature, rollout.top_p)
    rules = EpisodeRules(budget, sampling or job, rollout.sample_timeout_s, found.limits, job)
    backend = _backend(config, found, thread)
    if found.agent:
        from rollout_fleet.agents.driver import AgentDriver

        return AgentDriver(sampler, renderer, backend, rules)
    return EpisodeDriver(sampler, renderer, backend, rules)


def _backend(config: Config, found: Description, thread: EnvironmentThread) -> Backend:
    """Runs the config's environments: on `thread`, or in processes."""
    options = dict(config.tasks.options)
    if not found.limits.process:
        return ThreadBackend(registry.resolve(config.tasks.environment), options, thread)
    processes = ProcessHost(found.modules, found.limits.python or sys.executable)
    timeout_s = config.rollout.sample_timeout_s
    return ProcessBackend(found.path, options, found.limits, timeout_s, processes, found.shares_seed)


async def first_observation(config: Config, found: Description, problem: dict[str, Any]) -> Observation:
    """The first observation of a dataset row, made where an episode would run and within its limits.

    Raises EpisodeFailed with the reason why a sample would fail, BackendFailed when no environment can be started.
    """
    with closing(EnvironmentThread()) as thread, closing(_backend(config, found, thread)) as backend:
        environment = backend.environment(problem, config.run.seed, config.run.seed)
        try:
            async with bounded("reset", found.limits.reset_s):
                return await environment.reset()
        finally:
            await environment.close()
