"""A config under review: the checks of a launch that need no weights, the plan of the job, and remarks on it."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from common.config.checks import MODEL_HINT, is_loopback, problems, resolve_paths
from common.config.loading import load_either
from common.config.parallel_layout import ModelShape, Problem, model_problems, world_problems
from common.config.schema import Config, SftConfig
from common.errors import ConfigError, UsageError
from launch.plan.architecture import UnknownArchitecture, read_architecture
from launch.plan.job_plan import Plan, make_plan
from launch.plan.remarks import remarks
from rollout_fleet.environments.description import PYTHON_KEY, check_environment
from rollout_fleet.node.node import LOOKAHEAD_GROUPS

# how config_checks begins what it expects of a model's folder beside config.json
MISSING_FROM_MODEL = ("a Hugging Face model folder with a tokenizer", "a Hugging Face model folder with weights")


@dataclass
class Review:
    """What was found out about a config.

    Attributes:
        file: the config, as it was typed.
        plan: None when the layout does not fit the model.
        failed: checks that a launch would fail, whatever is brought along.
        before_launch: what has to be brought along, or is not possible yet.
        remarks: what no check refuses but a person should know.
    """

    file: str
    config: Config | SftConfig
    plan: Plan | None = None
    failed: list[str] = field(default_factory=list)
    before_launch: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def make_review(file: str, overrides: list[str], gpus_per_node: int = 8) -> Review:
    """Check and plan a config.

    Raises:
        UsageError: the config or the model's config.json cannot be read, or the planner cannot count the architecture.
    """
    config = resolve_paths(load_either(Path(file), overrides))
    review = Review(file, config)
    found = list(problems(config))
    for problem in found:
        (review.before_launch if _is_missing_file(problem, config) else review.failed).append(describe(problem))
    if isinstance(config, Config) and PYTHON_KEY not in [key for key, *_ in found]:
        try:
            check_environment(config.tasks, file, libraries=False)
        except ConfigError as error:
            review.failed.append(describe((error.key, error.expected, error.found, error.hint)))
    review.before_launch += _not_yet(config, gpus_per_node)
    document = read_model(Path(config.model.path))
    learner = config.learner
    shape = ModelShape.of(document.get)
    if not [*world_problems(learner.world_size, learner.parallel), *model_problems(shape, learner.parallel)]:
        try:
            model = read_architecture(document)
        except UnknownArchitecture as error:
            raise UsageError(f"model.path: {config.model.path}/config.json: {error}") from None
        review.plan = make_plan(config, model, gpus_per_node, LOOKAHEAD_GROUPS)
        review.remarks = remarks(config, review.plan)
    return review


def read_model(folder: Path) -> dict[str, object]:
    """config.json of a model folder; raises UsageError when there is nothing to plan from."""
    path = folder / "config.json"
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        needs = f"a plan needs at least the model's config.json; {MODEL_HINT}"
        raise UsageError(f"model.path: {path} does not exist; {needs}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: {path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"model.path: {path} holds no JSON object")
    return cast("dict[str, object]", document)


def describe(problem: Problem) -> str:
    """A problem in one line, without the current folder in front of paths."""
    key, expected, found, hint = problem
    text = f"{key}: expected {expected}, found {found}"
    return (f"{text}; {hint}" if hint else text).replace(f"{Path.cwd()}{os.sep}", "")


def _is_missing_file(problem: Problem, config: Config | SftConfig) -> bool:
    """Whether the problem goes away once somebody puts weights, a tokenizer or a dataset in its place."""
    key, expected, _, _ = problem
    if key == "model.path":
        return expected.startswith(MISSING_FROM_MODEL)
    datasets = {"tasks.dataset": config.tasks.dataset}
    if isinstance(config, Config) and config.tasks.eval_dataset:
        datasets["tasks.eval_dataset"] = config.tasks.eval_dataset
    return key in datasets and not Path(datasets[key]).exists()


def _not_yet(config: Config | SftConfig, gpus_per_node: int) -> list[str]:
    """What this version cannot launch by itself."""
    out: list[str] = []
    nodes = -(-config.learner.world_size // gpus_per_node)
    module = "learner.main" if isinstance(config, Config) else "learner.sft.main"
    if nodes > 1:
        out.append(
            f"learner.world_size: {config.learner.world_size} ranks are {nodes} nodes of {gpus_per_node}, and this "
            f"version starts those of one machine; on each node run torchrun --nnodes {nodes} "
            f"--nproc-per-node {gpus_per_node} with its rendezvous options and -m {module} --config RUN/config.yaml"
        )
    if isinstance(config, Config):
        devices = config.learner.world_size + config.rollout.nodes * config.rollout.engine.tensor_parallel
        if devices > gpus_per_node and is_loopback(config.weights.address):
            out.append(
                f"weights.address: {devices} devices of learner and rollout nodes are more than one "
                f"machine of {gpus_per_node} has, and weights.address is a loopback address; weights.transport: relay "
                "with broker.credentials may use another"
            )
    return out
