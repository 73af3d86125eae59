"""A config under review: the checks of a launch that need no weights, the plan of the job, and remarks on it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.config.checks import MODEL_HINT, problems, resolve_paths
from common.config.loading import load_either
from common.config.network_checks import is_loopback, split_address
from common.config.parallel_layout import ModelShape, model_problems, world_problems
from common.config.schema import Config, SftConfig
from common.errors import ConfigError, Problem, UsageError
from common.hub import SCHEME, local_copy
from launch.plan.architecture import UnknownArchitecture, read_architecture
from launch.plan.job_plan import Plan, make_plan
from launch.plan.remarks import remarks
from rollout_fleet.environments.description import PYTHON_KEY, Description, check_environment

GPUS_PER_NODE = 8
LINK_GBIT = 100.0  # Gb/s of a machine's link

# The config checks say with these words that only files of the model are missing, or a dataset.
MODEL = "a Hugging Face model folder"
MISSING = (f"{MODEL} with a tokenizer", f"{MODEL} with weights", "a JSONL or parquet file")


@dataclass
class Review:
    """A config, the plan of its job, and everything that speaks against a launch."""

    file: str  # the config's name in messages
    config: Config | SftConfig
    plan: Plan | None = None  # None when the layout does not fit the model, or `no_plan` says why
    refused: list[Problem] = field(default_factory=list)  # even when every file is in its place
    missing: list[Problem] = field(default_factory=list)  # files that have to be brought along
    not_yet: list[str] = field(default_factory=list)  # parts that this version cannot launch by itself
    remarks: list[str] = field(default_factory=list)  # sentences on what no check refuses
    no_plan: str = ""  # the reason why the model cannot be planned
    environment: Description | None = None  # None when it is refused, or the config has none

    @property
    def failed(self) -> list[str]:
        return [describe(problem) for problem in self.refused]

    @property
    def before_launch(self) -> list[str]:
        return [*(describe(problem) for problem in self.missing), *self.not_yet]


def make_review(
    file: str, overrides: list[str], gpus_per_node: int = GPUS_PER_NODE, link_gbit: float = LINK_GBIT
) -> Review:
    """Check and plan a config on a machine that need not run it; raises UsageError when there can be no plan."""
    config = resolve_paths(load_either(Path(file), overrides))
    made = review(config, file, gpus_per_node, link_gbit, libraries=False)
    if made.no_plan:
        raise UsageError(made.no_plan)
    return made


def review(
    config: Config | SftConfig,
    file: str,
    gpus_per_node: int = GPUS_PER_NODE,
    link_gbit: float = LINK_GBIT,
    libraries: bool = True,
) -> Review:
    """Check and plan a config with absolute paths; `libraries`: those of the environment must be installed here."""
    made = Review(file, config, not_yet=[*_not_yet(config, gpus_per_node)])
    name = config.model.path
    try:  # only config.json is needed of the model, also where it is in the hub
        path = Path(local_copy("model.path", name, only_config=True))
    except UsageError as error:
        made.no_plan = str(error)
        made.refused.append(Problem("model.path", "a model of the hub", made.no_plan.removeprefix("model.path: ")))
        return made
    model = msgspec.structs.replace(config.model, path=str(path))
    made.config = config = msgspec.structs.replace(config, model=model)
    for problem in problems(config):
        no_keys = problem.key == "broker.credentials" and not Path(problem.found.split(",")[0]).exists()
        if not (problem.expected.startswith(MISSING) or no_keys):
            made.refused.append(problem)
        elif not (problem.key == "model.path" and name.startswith(SCHEME)):  # a launch downloads them
            made.missing.append(problem)
    if isinstance(config, Config) and PYTHON_KEY not in [key for key, *_ in made.refused]:
        try:
            made.environment = check_environment(config.tasks, file, libraries)
        except ConfigError as error:
            made.refused.append(Problem(error.key, error.expected, error.found, error.hint))
    learner = config.learner
    try:
        document = read_model(path)
        shape = ModelShape.of(document.get)
        if not [*world_problems(learner.world_size, learner.parallel), *model_problems(shape, learner.parallel)]:
            made.plan = make_plan(config, read_architecture(document), gpus_per_node, link_gbit)
            made.remarks = remarks(config, made.plan)
    except UnknownArchitecture as error:
        made.no_plan = f"model.path: {path}/config.json: {error}"
    except UsageError as error:
        made.no_plan = str(error)
    return made


def read_model(folder: Path) -> dict[str, object]:
    """config.json of a model folder; raises UsageError when there is nothing to plan from."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        needs = f"a plan needs at least the model's config.json; {MODEL_HINT}"
        raise UsageError(f"model.path: {path} does not exist; {needs}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: {path} cannot be read: {error}") from None


def describe(problem: Problem) -> str:
    """A problem in one line, without the current folder in front of paths."""
    return str(problem).replace(f"{Path.cwd()}{os.sep}", "")


def _not_yet(config: Config | SftConfig, gpus_per_node: int) -> Iterator[str]:
    """Parts that this version cannot launch by itself."""
    ranks = config.learner.world_size
    nodes = -(-ranks // gpus_per_node)
    if nodes > config.learner.machines:
        needed = f"{ranks} ranks need {nodes} machines of {gpus_per_node}"
        yield f"learner.machines: {needed}, and learner.machines is {config.learner.machines}; docs/machines.md"
    if config.learner.machines > 1:
        if any(is_loopback(split_address(address)[0]) for address in config.broker.addresses):
            machines = f"the {config.learner.machines} machines of the learner do not reach a loopback address"
            yield f"broker.address: {machines}; name one of the broker's machine, tcp://HOST:PORT"
    elif isinstance(config, Config):
        devices = sum(config.device_shares.values())
        if devices > gpus_per_node and is_loopback(config.weights.address):
            why = f"{devices} devices of learner and rollout nodes are more than one machine of {gpus_per_node} has"
            needs = "broker.credentials, and weights.transport: relay or weights.network: trusted"
            yield f"weights.address: {why}, and weights.address is a loopback address; another one needs {needs}"
