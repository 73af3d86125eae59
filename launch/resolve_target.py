"""From what a person typed, CONFIG or RUN, to a checked config and a run folder."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config.checks import C, Reader, check_config, resolve_paths
from common.config.loading import build_config, load_config, load_either, load_resolved
from common.config.schema import Config
from common.errors import UsageError
from common.process.run_dir import RunDir


def load_job(
    path: str, overrides: Sequence[str] = (), environment: bool = False, reader: Reader = "all"
) -> tuple[Config, RunDir]:
    """A checked RL config with absolute paths, and its run folder; arguments and raises as `checked`."""
    return checked(load_config(Path(path), overrides), path, environment, reader)


def checked(config: C, file: str, environment: bool = True, reader: Reader = "all") -> tuple[C, RunDir]:
    """The config with absolute paths after all checks that need no heavy import, and its run folder.

    Args:
        file: named in errors.
        environment: also import the environment, for the commands whose Python environment must have it.
        reader: the role that starts here; files that only others read may be missing.

    Raises:
        UsageError: ConfigError when a key is wrong.
    """
    config = resolve_paths(config)
    check_config(config, file, reader)
    if environment and isinstance(config, Config):
        from rollout_fleet.environments.description import check_environment

        check_environment(config.tasks, file)
    return config, RunDir(config.run.dir)


def config_file(word: str) -> Path:
    """CONFIG itself, or the config.yaml in RUN; raises UsageError when there is none."""
    file = Path(word) / "config.yaml" if Path(word).is_dir() else Path(word)
    if not file.is_file():
        raise UsageError(f"{word} is neither a config file nor the folder of a run with its config.yaml")
    return file


def need_broker_library(config: Config) -> None:
    """Raise UsageError when this Python lacks what broker.store takes; asked before the run folder is made."""
    if config.broker.store == "redis":
        from broker.journal.redis_store.connection import redis_module

        redis_module("redis.connection")


def find_run(word: str) -> RunDir:
    """RUN as a folder, or the run.dir of a config file; raises UsageError when neither exists."""
    path = Path(word)
    if path.is_dir():
        run = RunDir(path)
        if not run.config.exists() and not run.metrics.exists() and not run.broker_json.exists():
            raise UsageError(f"{word} is not the folder of a run: it has no config.yaml")
        return run
    if path.is_file():
        run = RunDir(resolve_paths(load_either(path)).run.dir)
        if not run.path.is_dir():
            raise UsageError(f"{word} names the run folder {run.path}, which does not exist yet")
        return run
    raise UsageError(f"{word} is neither the folder of a run nor a config file")


def config_of(run: RunDir, kind: type[C] = Config) -> C | None:
    """The resolved config in a run folder; None when there is none or it is of another kind."""
    config = load_resolved(run.config) if run.config.exists() else None
    return config if isinstance(config, kind) else None


def joined_config(data: bytes, address: str, overrides: Sequence[str]) -> Config:
    """The job's config as the broker at `address` handed it out, with this node's overrides."""
    try:
        document = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise UsageError(f"the broker at {address} has no readable config: {error}") from None
    return build_config(document, f"the config of the broker at {address}", overrides)
