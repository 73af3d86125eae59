"""A config under review: the checks of a launch that need no weights, the plan of the job, and remarks on it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from common.config.architecture import UnknownArchitecture, read_architecture
from common.config.checks import MODEL_HINT, problems, resolve_paths
from common.config.loading import load_either
from common.config.network_checks import is_loopback, split_address
from common.config.parallel_layout import model_problems, world_problems
from common.config.schema import BaseConfig
from common.errors import ConfigError, Problem, UsageError
from common.hub import SCHEME, local_copy
from launch.checks.advice import Proposal, propose, remarks
from launch.checks.findings import Finding, note
from launch.plan.job_plan import GIB, Plan, make_plan
from launch.plan.memory import DEVICES, fits
from rollout_fleet.environments.description import PYTHON_KEY, Description, check_environment

GPUS_PER_NODE = 8
LARGEST_GPU = 288e9  # bytes
LINK_GBIT = 100.0  # Gb/s of a machine's link


@dataclass
class Review:
    """A config, the plan of its job, and everything that speaks against a launch."""

    file: str  # the config's name in messages
    config: BaseConfig
    plan: Plan | None = None  # None when the layout does not fit the model, or `no_plan` says why
    refused: list[Problem] = field(default_factory=list)  # even when every file is in its place
    missing: list[Problem] = field(default_factory=list)  # files that have to be brought along
    not_yet: list[Finding] = field(default_factory=list)  # parts that this version cannot launch by itself
    proposal: Proposal | None = None  # where the layout does not fit every GPU
    remarks: list[Finding] = field(default_factory=list)  # no check refuses these
    no_plan: str = ""  # the reason why the model cannot be planned
    environment: Description | None = None  # None when it is refused, or the config has none

    @property
    def failed(self) -> list[str]:
        return [describe(problem) for problem in self.refused]

    @property
    def before_launch(self) -> list[str]:
        return [*(describe(problem) for problem in self.missing), *(finding.what for finding in self.not_yet)]


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
    config: BaseConfig,
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
        path = Path(file).parent / "models" / name.rpartition("/")[2].partition("@")[0]
        problem = Problem("model.path", "a model of the hub", str(error).removeprefix("model.path: "))
        if not (path / "config.json").is_file():
            made.no_plan = str(error)
            made.refused.append(problem)
            return made
        made.missing.append(problem)
        not_here = f"The hub's model is not here; its shape is the one in {path}/config.json."
        made.remarks.append(note("model", "not_here", not_here))
    model = msgspec.structs.replace(config.model, path=str(path))
    made.config = config = msgspec.structs.replace(config, model=model)
    for problem in problems(config):
        downloaded = problem.key == "model.path" and name.startswith(SCHEME)  # by a launch
        if problem.kind == "value":
            made.refused.append(problem)
        elif not downloaded:
            made.missing.append(problem)
    made.refused += machine_problems(config, gpus_per_node)
    if config.rl is not None and PYTHON_KEY not in [problem.key for problem in made.refused]:
        try:
            made.environment = check_environment(config.rl.tasks, file, libraries)
        except ConfigError as error:
            made.refused.append(Problem(error.key, error.expected, error.found, error.hint))
    try:
        _add_plan(made, path, gpus_per_node, link_gbit)
    except UnknownArchitecture as error:
        made.no_plan = f"model.path: {path}/config.json: {error}"
    except UsageError as error:
        made.no_plan = str(error)
    return made


def _add_plan(made: Review, folder: Path, gpus_per_node: int, link_gbit: float) -> None:
    """The plan, what follows from it alone, and remarks; nothing where the layout does not fit the model.

    Raises UnknownArchitecture, and UsageError as `read_model`.
    """
    config, parallel = made.config, made.config.learner.parallel
    model = read_architecture(read_model(folder))
    if [*world_problems(config.learner.world_size, parallel), *model_problems(model, parallel)]:
        return
    plan = made.plan = make_plan(config, model, gpus_per_node, link_gbit)
    if not all(fits(plan.fullest.peak, size) for size in DEVICES.values()):
        made.proposal = propose(config, plan)
    made.remarks += remarks(config, plan, made.proposal)
    if plan.rl is not None and (weights := plan.rl.engine.weight_bytes) > LARGEST_GPU:
        found = f"{weights / GIB:.0f} GiB of weights per device, more than any GPU has"
        made.refused.append(Problem("rollout.engine.tensor_parallel", "more devices per engine", found))


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


def machine_problems(config: BaseConfig, gpus_per_node: int) -> Iterator[Problem]:
    """Parts of a job that do not fit on machines of so many GPUs."""
    world, machines = config.learner.world_size, config.learner.machines
    hint = f"machines of {gpus_per_node} GPUs are assumed; --gpus-per-node of `slipstream plan` says otherwise"
    if world > machines * gpus_per_node:
        expected = f"at least {-(-world // gpus_per_node)} for {world} ranks; docs/machines.md"
        yield Problem("learner.machines", expected, f"{machines}", hint)
    if config.rl is not None and (engine := config.rl.rollout.engine).devices > gpus_per_node:
        expected = f"tensor_parallel x pipeline_parallel of at most {gpus_per_node}, the GPUs of its machine"
        found = f"{engine.tensor_parallel} x {engine.pipeline_parallel} = {engine.devices}"
        yield Problem("rollout.engine.tensor_parallel", expected, found, hint)


def _not_yet(config: BaseConfig, gpus_per_node: int) -> Iterator[Finding]:
    """Parts that this version cannot launch by itself."""
    if config.learner.machines > 1:
        if any(is_loopback(split_address(address)[0]) for address in config.broker.addresses):
            machines = f"the {config.learner.machines} machines of the learner do not reach a loopback address"
            what = f"broker.address: {machines}; name one of the broker's machine, tcp://HOST:PORT"
            yield note("launch", "loopback_broker", what)
    elif config.rl is not None:
        devices = sum(config.rl.device_shares.values())
        if devices > gpus_per_node and is_loopback(config.rl.weights.address):
            why = f"{devices} devices of learner and rollout nodes are more than one machine of {gpus_per_node} has"
            needs = "broker.credentials, and weights.transport: relay or weights.network: trusted"
            what = f"weights.address: {why}, and weights.address is a loopback address; another one needs {needs}"
            yield note("launch", "loopback_weights", what)
