"""From a config to an episode driver."""

import sys
from typing import Any

from common.config.schema import Config
from common.hub import load_tokenizer
from rollout_fleet.environments import registry
from rollout_fleet.environments.description import Description, check_environment
from rollout_fleet.environments.isolation.placement import Stage, ThreadStage
from rollout_fleet.environments.isolation.process_host import ProcessHost, ProcessStage
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.environments.protocol import Budget, Observation
from rollout_fleet.episode.driver import EpisodeDriver, EpisodeRules, Sampling, bounded
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Sampler


def build_driver(
    config: Config, sampler: Sampler, host: EnvironmentHost, sampling: Sampling | None = None
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
    stage = build_stage(config, found, host)
    if found.agent:
        from rollout_fleet.agents.driver import AgentDriver

        return AgentDriver(sampler, renderer, stage, rules)
    return EpisodeDriver(sampler, renderer, stage, rules)


def build_stage(config: Config, found: Description, host: EnvironmentHost) -> Stage:
    """The place of the config's environments: the thread of `host`, or processes that end with it."""
    options, timeout_s = dict(config.tasks.options), config.rollout.sample_timeout_s
    if not found.limits.process:
        return ThreadStage(registry.resolve(config.tasks.environment), options, host)
    processes = ProcessHost(found.modules, found.limits.python or sys.executable)
    host.at_close.append(processes.close)
    return ProcessStage(found.path, options, found.limits, timeout_s, processes, found.shares_seed)


async def first_observation(config: Config, found: Description, problem: dict[str, Any]) -> Observation:
    """The first observation of a dataset row, made where an episode would run and within its limits.

    Raises EpisodeFailed with the reason why a sample would fail, StageFailed when no environment can be started.
    """
    host = EnvironmentHost()
    try:
        seat = build_stage(config, found, host).seat(problem, config.run.seed, config.run.seed)
        try:
            async with bounded("reset", found.limits.reset_s):
                return await seat.reset()
        finally:
            await seat.close()
    finally:
        host.close()
