"""From what a person typed, CONFIG, RUN or ADDRESS, to a checked config, a run folder or a broker."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from broker.client.connect import ask_status
from broker.contract import RunInfo
from common.config.checks import C, downloaded, resolve_paths
from common.config.loading import Document, build_config, kind_of, load_config, load_either
from common.config.network_checks import fixed_address, is_redis, split_address
from common.config.schema import BaseConfig, Config, Reader
from common.config.without_effect import without_effect
from common.errors import ConfigError, UsageError, of_source
from common.json_lines import EventFile
from common.process.run_dir import CHANGEABLE, OF_A_MACHINE, RunDir, changeable, other_values
from learner.loss import plugins


def load_job(
    path: str, overrides: Sequence[str] = (), environment: bool = False, reader: Reader = "all"
) -> tuple[Config, RunDir]:
    """A checked RL config with absolute paths, and its run folder; arguments and raises as `checked`."""
    return checked(load_config(Path(path), overrides), path, environment, reader)


def job_of(args: argparse.Namespace, reader: Reader) -> tuple[Config, RunDir, str, str]:
    """The job of CONFIG, else that of the broker at --join with this machine's overrides; its run folder; the address.

    The address is '' without --join. The fourth is the run_id of the broker whose config it is, '' with CONFIG.
    --credentials becomes an override. Raises UsageError.
    """
    if args.config is None and args.join is None:
        raise UsageError(f"a {reader} needs a CONFIG, or the address of a job's broker: --join tcp://HOST:PORT")
    if args.join is not None:
        check_address(args.join, "--join")
    join: str = args.join or ""
    if args.credentials is not None:
        args.overrides = [*args.overrides, f"broker.credentials={Path(args.credentials).expanduser().resolve()}"]
    runs_episodes = reader == "node"
    if args.config is not None:
        return *load_job(args.config, args.overrides, runs_episodes, reader), join, ""
    status = ask_status(join, args.join_timeout_s, args.credentials)
    joined = joined_config(status.run.config, join, args.overrides)
    config, run = checked(joined, f"the job at {join}", runs_episodes, reader)
    if reader == "learner" and (ignored := without_commands(msgspec.json.decode(status.run.config))):
        print(f"commands of {', '.join(ignored)} are ignored: only a config file here may set them", file=sys.stderr)
        with suppress(OSError), closing(EventFile(run.events, "learner")) as events:
            events.add("watch_commands_ignored", rules=ignored, broker=join)
    several = fixed_address(config) if len(config.broker.addresses) > 1 else None
    return config, run, several or join, status.run.run_id


def checked(config: C, file: str, environment: bool = True, reader: Reader = "all") -> tuple[C, RunDir]:
    """The config with absolute paths after all checks that need no heavy import, and its run folder.

    Errors name `file`. `environment`: also import the environment, for the commands whose Python must have it.
    `reader`: the role that starts here; files that only others read may be missing. A job that has not begun also
    tries the dataset's first row. Raises UsageError: ConfigError when a key is wrong.
    """
    config = resolve_paths(config)
    config.validate(file, reader)  # before a long download
    if (local := downloaded(config, reader)) != config:  # the config that is returned keeps the hub's names
        local.validate(file, reader)
    if reader == "all" and config.rl is not None:
        for problem in plugins.ask(config.rl):
            raise ConfigError.of(file, problem)
    if environment and config.rl is not None:
        from rollout_fleet.environments.description import check_sources, limit_problems

        found = check_sources(config.rl, file)
        begins = reader == "all" and not RunDir.of(config).began  # a reset may take long: none in a job that goes on
        for problem in limit_problems(config.rl, found):
            if begins:
                raise ConfigError.of(file, problem)
            print(f"warning: {problem}", file=sys.stderr, flush=True)
        for name, job in local.rl.sources.items() if local.rl is not None else ():
            if job.tasks.reward is not None or (begins and not found[name].agent):
                from rollout_fleet.driver_factory import check_names, check_rows

                with of_source(name):
                    names = check_rows(job, found[name], file)
                check_names(job, name, names, file)
        if local.rl is not None and local.rl.scorers:
            from rollout_fleet.scorers.check import check_scorers

            for sentence in check_scorers(local.rl, file):
                print(sentence, file=sys.stderr)
    return config, RunDir.of(config)


def warn_of_unused(config: BaseConfig) -> None:
    """Say which keys do nothing; for a launch of a whole job."""
    for sentence in without_effect(config):
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def config_file(word: str) -> Path:
    """CONFIG itself, or the config.yaml in RUN; raises UsageError when there is none."""
    file = Path(word) / "config.yaml" if Path(word).is_dir() else Path(word)
    if not file.is_file():
        raise UsageError(f"{word} is neither a config file nor the folder of a run with its config.yaml")
    return file


def need_broker_library(config: Config) -> None:
    """Raise UsageError when this Python lacks what broker.store takes; asked before the run folder is made."""
    if config.broker.store == "redis":
        from broker.journal.redis_server import redis_module

        redis_module("redis.connection")


@dataclass(frozen=True)
class Target:
    """A job: its run folder, or, on a machine without it, the address of its broker."""

    run: RunDir | None
    credentials: str | None = None  # broker.credentials
    address: str = ""  # unless there is a run folder

    def broker(self) -> tuple[str, str]:
        """(address, '') of the broker; ('', why there is none) when the run folder says that it is not running."""
        if self.run is None:
            return self.address, ""
        file = self.run.broker()
        if file is None:
            return "", "the broker has ended" if self.run.status_json.exists() else "no broker has run here yet"
        return ("", f"broker {file.pid} has ended") if file.ended else (file.address, "")


def find_target(args: argparse.Namespace) -> Target:
    """RUN|ADDRESS and --credentials, by default the config's; raises UsageError when they name nothing."""
    if "://" in args.run:
        check_address(args.run, "ADDRESS")
        return Target(None, args.credentials, args.run)
    run = find_run(args.run)
    config = None if args.credentials else any_config_of(run)
    return Target(run, config.broker.credentials if config else args.credentials)


def check_address(address: str, what: str) -> None:
    """Raise UsageError when `address`, given as `what`, cannot be a broker's."""
    try:
        ports = [split_address(entry)[1] for entry in address.split(",")]
    except ValueError as error:
        hint = "; the broker of a run with broker.store: redis, not its Redis server" if is_redis(address) else ""
        raise UsageError(f"{what}: {error}, found {address!r}{hint}") from None
    if 0 in ports:
        raise UsageError(f"{what}: {address} names no port; RUN/broker.json and `slipstream status RUN` have the port")


def find_run(word: str) -> RunDir:
    """RUN as a folder, or the run.dir of a config file; raises UsageError when neither exists."""
    path = Path(word)
    if path.is_dir():
        run = RunDir(path)
        with suppress(UsageError):  # said by the command that needs the config
            if (config := config_of(run)) is not None:
                run = RunDir(path, config.learner.checkpoint.dir)
        if not run.config.exists() and not run.metrics.exists() and not run.broker_json.exists():
            raise UsageError(f"{word} is not the folder of a run: it has no config.yaml")
        return run
    if path.is_file():
        run = RunDir.of(resolve_paths(load_either(path)))
        if not run.path.is_dir():
            raise UsageError(f"{word} names the run folder {run.path}, which does not exist yet")
        return run
    raise UsageError(f"{word} is neither the folder of a run nor a config file, nor an address tcp://HOST:PORT")


def config_of(run: RunDir, kind: type[C] = Config) -> C | None:
    """The resolved config in a run folder; None when there is none or it is of another kind."""
    config = any_config_of(run)
    return config if isinstance(config, kind) else None


def any_config_of(run: RunDir) -> BaseConfig | None:
    """The resolved config in a run folder, whichever kind; None when there is none."""
    return load_either(run.config) if run.config.exists() else None


def check_same_job(config: BaseConfig, file: str, served: RunInfo, address: str) -> None:
    """Raise UsageError, naming the keys, when `config` computes something else than the job of the broker.

    Also when its run.dir is the folder of another run with the same config.
    """
    job = resolve_paths(handed_out(served.config, address))
    if type(job) is not type(config):
        raise UsageError(f"{file} is {config.kind}, and the broker at {address} serves {job.kind}")
    others = other_values(job, config, (*CHANGEABLE, *changeable(config), *OF_A_MACHINE))
    differing = [f"{key} is {ours!r} in {file} and {theirs!r} there" for key, theirs, ours in others]
    if differing:
        raise UsageError(f"the broker at {address} serves another job: {'; '.join(differing[:3])}")
    run = RunDir(config.run.dir)
    if run.run_id and served.run_id not in ("", run.run_id):
        theirs = f"the broker at {address} serves the run of {served.run_dir}, id {served.run_id}"
        hint = f"If that broker continues this run, remove {run.run_id_file}"
        raise UsageError(f"run.dir: {theirs}; {run.path} has the run with id {run.run_id}. {hint}")


def joined_config(data: bytes, address: str, overrides: Sequence[str]) -> Config:
    """The job's config as the broker at `address` handed it out, without commands, with this machine's overrides."""
    return build_config(*_document(data, address), overrides)


def handed_out(data: bytes, address: str) -> BaseConfig:
    """As `joined_config`, also that of a warm start on several machines."""
    document, name = _document(data, address)
    return build_config(document, name, schema=kind_of(document))


def _document(data: bytes, address: str) -> tuple[Document, str]:
    """The config of the broker at `address` without commands, and its name in errors."""
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.DecodeError as error:
        raise UsageError(f"the broker at {address} has no readable config: {error}") from None
    without_commands(document)
    return document, f"the config of the broker at {address}"


def without_commands(document: Any) -> list[str]:
    """Take the commands of watch rules out of a config that came over the network; the rules that had one."""
    rules = document.get("watch") if isinstance(document, dict) else None
    found: list[str] = []
    for number, rule in enumerate(rules if isinstance(rules, list) else ()):
        if isinstance(rule, dict) and (rule.pop("command", None) or rule.get("do") == "run"):
            rule["do"] = "warn"
            found.append(f"watch[{number}]")
    return found
