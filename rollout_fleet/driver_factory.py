"""From a config to an episode driver."""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.schema import Config
from common.errors import ConfigError
from rollout_fleet.environments import registry
from rollout_fleet.environments.isolation.placement import Stage, ThreadStage, takes_group_seed
from rollout_fleet.environments.isolation.process_host import ProcessHost, ProcessStage
from rollout_fleet.environments.isolation.thread_host import EnvironmentHost
from rollout_fleet.environments.limits import limits_of
from rollout_fleet.environments.protocol import Budget, Limits
from rollout_fleet.episode.driver import Driver, EpisodeDriver, Sampling
from rollout_fleet.episode.rendering import Renderer, Tokenizer
from rollout_fleet.episode.sampler_protocol import Sampler

if TYPE_CHECKING:
    from rollout_fleet.agents.driver import AgentStage

logger = logging.getLogger(__name__)


def build_driver(config: Config, sampler: Sampler, host: EnvironmentHost, sampling: Sampling | None = None) -> Driver:
    """The driver of the config's environment and budgets.

    Args:
        config: the job's config.
        sampler: an engine, started or not.
        host: where the environments live.
        sampling: None: rollout.temperature and rollout.top_p.

    Raises:
        ConfigError: environment, options or tokenizer cannot be used.
    """
    rollout, tasks = config.rollout, config.tasks
    environment = registry.resolve(tasks.environment, tasks.options)
    registry.check_libraries(environment, tasks.environment, tasks.limits.python)
    limits = limits_of(environment, tasks.limits)
    renderer = Renderer(load_tokenizer(config.model.path))
    budget = Budget(rollout.max_turns, rollout.max_tokens, rollout.engine.max_model_len)
    job = Sampling(rollout.temperature, rollout.top_p)
    sampling = sampling or job
    timeout_s, shares = rollout.sample_timeout_s, takes_group_seed(environment)
    if registry.is_agent(environment):
        from rollout_fleet.agents.driver import AgentDriver

        agents = _agent_stage(config, environment, limits, host)
        return AgentDriver(sampler, renderer, agents, budget, sampling, timeout_s, limits, shares, job)
    stage = _stage(config, environment, limits, host)
    return EpisodeDriver(sampler, renderer, stage, budget, sampling, timeout_s, limits)


def _stage(config: Config, environment: Any, limits: Limits, host: EnvironmentHost) -> Stage:
    """Where the episodes' environments live."""
    options, path = dict(config.tasks.options), registry.path_of(config.tasks.environment)
    if not limits.process:
        return ThreadStage(environment, options, host)
    processes = _processes(path, environment, limits, host)
    shares = takes_group_seed(environment)
    return ProcessStage(path, options, limits, config.rollout.sample_timeout_s, processes, shares)


def _agent_stage(config: Config, agent: Any, limits: Limits, host: EnvironmentHost) -> "AgentStage":
    """Where the episodes' agents run."""
    from rollout_fleet.agents.driver import AgentProcess, AgentThread

    options, path = dict(config.tasks.options), registry.path_of(config.tasks.environment)
    if not limits.process:
        return AgentThread(agent, options, host)
    return AgentProcess(path, options, limits, config.rollout.sample_timeout_s, _processes(path, agent, limits, host))


def _processes(path: str, environment: Any, limits: Limits, host: EnvironmentHost) -> ProcessHost:
    found = ProcessHost((path.partition(":")[0], *getattr(environment, "PRELOAD", ())), limits.python or sys.executable)
    host.at_close(found.close)
    return found


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; raises ConfigError naming model.path."""
    from transformers import AutoTokenizer

    try:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"{path} is not a folder")
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError("config", "model.path", "a Hugging Face folder with a tokenizer", reason) from error
