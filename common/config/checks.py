"""Checks of a config that need more than one key, or a look at the disk. No torch, no engine, no network.

`BaseConfig.validate` raises the first ConfigError; `resolve_paths` makes the folders absolute first, so that every role
means the same place whatever directory it is started in. `downloaded` puts local copies in place of the hub's names,
in the process that reads them. The run's config and the broker keep the names, which no check looks behind.
"""

import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from common.config.architecture import Architecture, UnknownArchitecture, read_architecture
from common.config.converted import is_converted, read_converted
from common.config.critic_checks import SCORE, critic_problems, is_critic, labels_of, warmup_problems
from common.config.group_size import routing_bytes
from common.config.loading import Document, describe_value
from common.config.lora_checks import lora_problems
from common.config.loss import OF_ONE, OVER_THE_BATCH, advantage_problems, is_plugin, loss_problems, update_problems
from common.config.network_checks import address_problems, broker_problems, buffers_problems, weights_address_problems
from common.config.optimizer import schedule_problems
from common.config.parallel_layout import (
    architecture_problems,
    attention_problems,
    document_multiple,
    model_problems,
    padded,
    world_problems,
)
from common.config.passthrough import engine_step_problems, passthrough_problems, quantization_problems
from common.config.schema import BaseConfig, Config, MoeConfig, Reader
from common.config.tasks import kept_rows
from common.errors import Problem, UsageError, meant, nearest
from common.evaluation import dataset_names, pass_ks
from common.hub import SCHEME, TOKENIZER_FILES, absolute, local_copy
from common.json_lines import FIRST_ROWS, OtherFormat, dataset_exists, dataset_rows
from common.metrics import SOURCE_FIGURES, EvaluationMetrics, numbers

LOWEST_TEMPERATURE = 0.01  # vLLM samples greedily, or clamps, below it: log-probabilities would not be what was sampled
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses higher ones
MODEL_HINT = (
    "a model of the hub is OWNER/NAME; launch/quickstart.sh makes those of the quickstart, `slipstream sft` the one of "
    "a warm start"
)
DATASET_HINT = "a file of the hub is hf://datasets/OWNER/NAME/FILE"
READERS: dict[str, tuple[Reader, ...]] = {  # keys that name files, and who reads them: only there must they exist
    "model.path": ("all", "learner", "node"),
    "tasks.dataset": ("all", "learner"),
    "tasks.sources.*.dataset": ("all", "learner"),
    "evaluation.datasets": ("all", "learner"),
    "tasks.limits.python": ("all", "node"),
    "learner.loss.reference": ("all", "learner"),
    "learner.critic.path": ("all", "learner"),
}
PATHS = (
    "run.dir", "model.path", "tasks.dataset", "tasks.sources.*.dataset", "evaluation.datasets",
    "learner.loss.reference", "learner.critic.path", "learner.checkpoint.dir", "broker.credentials",
    "scorers.*.tokenizer",
)  # fmt: skip
MOST_LISTED = 1 << 17  # ranks, nodes and samples of a step, which programs list one by one
C = TypeVar("C", bound=BaseConfig)


def resolve_paths(config: C) -> C:
    """The same config with absolute paths, from the current folder, or 'hf://...' names; raises as `absolute`."""
    return _with_paths(config, PATHS, absolute)


def named_paths(config: BaseConfig) -> list[str]:
    """The values of PATHS in the config, names of the hub among them."""
    found: list[str] = []

    def note(_key: str, value: str) -> str:
        found.append(value)
        return value

    _with_paths(config, PATHS, note)
    return found


def downloaded(config: C, reader: Reader = "all") -> C:
    """The same config with local copies for the hub's names that `reader` reads; raises UsageError as `local_copy`."""
    return _with_paths(config, _read_by(reader, config), local_copy)


def _read_by(reader: Reader, config: BaseConfig) -> set[str]:
    """The keys of READERS whose files this role reads."""
    evaluates = reader == "all" or config.evaluation.every > 0
    return {key for key, roles in READERS.items() if reader in roles and (evaluates or key != "evaluation.datasets")}


def _with_paths(config: C, keys: Iterable[str], change: Callable[[str, str], str]) -> C:
    document = msgspec.to_builtins(config)
    for key in keys:
        *sections, name = key.split(".")
        for at, section in _sections(document, sections):
            if section.get(name):
                section[name] = _changed(section[name], f"{at}{name}", change)
    return msgspec.convert(document, type(config))


def _sections(at: dict[str, Any], names: list[str], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(key path with its point, section) of every section at `names`, where * stands for each entry of a mapping."""
    if not names:
        yield path, at
    elif (name := names[0]) != "*":
        yield from _sections(at.get(name) or {}, names[1:], f"{path}{name}.")
    else:
        for each in at:
            yield from _sections(at[each], names[1:], f"{path}{each}.")


def _changed(found: Any, key: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(found, dict):
        return {name: _changed(value, f"{key}.{name}", change) for name, value in cast("Document", found).items()}
    return [change(key, path) for path in cast("list[str]", found)] if isinstance(found, list) else change(key, found)


def problems(config: BaseConfig, reader: Reader = "all") -> Iterator[Problem]:
    """Everything that does not fit, the most basic first."""
    of_length = _length(config, reader) if reader != "learner" else ()
    for problem in chain(_problems(config, _read_by(reader, config)), of_length):
        if not problem.found:
            value: object = reduce(getattr, problem.key.split("."), config)
            problem = replace(problem, found=describe_value(value))
        yield problem


def _length(config: BaseConfig, reader: Reader) -> Iterator[Problem]:
    """Keys that do not fit the run's length. The learner alone has the config of a replay, which may end earlier."""
    if config.rl is not None:
        yield from warmup_problems(config.rl)
    if reader == "node":
        return  # a job of an earlier release may run with such a schedule
    learner = config.learner
    critic = learner.value_model
    alone = critic.warmup_steps if critic is not None else 0  # the policy's schedule begins after these steps
    updates = (config.run.steps - alone) * learner.updates
    yield from schedule_problems("learner.optimizer", learner.optimizer, updates)
    if critic is not None:
        yield from schedule_problems("learner.critic.optimizer", critic.optimizer, config.run.steps * learner.updates)


def _problems(config: BaseConfig, read: set[str]) -> Iterator[Problem]:
    moe = config.learner.moe
    yield from size_problems(config)
    yield from world_problems(config.learner.world_size, config.learner.parallel)
    yield from attention_problems(config.model.dtype, config.learner.parallel)
    yield from passthrough_problems(config)
    if moe.freeze_router and moe.balance != "none":
        hint = "a frozen router balances nothing"
        yield Problem("learner.moe.balance", "none with learner.moe.freeze_router", hint=hint)
    ranks = config.learner.world_size
    sinks = config.telemetry.sinks
    if twice := [name for number, name in enumerate(sinks) if name in sinks[:number]]:
        yield Problem("telemetry.sinks", "each tracker once", f"{twice[0]} twice")
    if wrong := [rank for rank in config.telemetry.profile_ranks if rank >= ranks]:
        yield Problem("telemetry.profile_ranks", f"ranks below learner.world_size ({ranks})", f"{wrong[0]}")
    yield from _keep_best(config)
    model = (yield from model_folder_problems(config.model.path)) if "model.path" in read else None
    if model is not None:
        yield from model_problems(model, config.learner.parallel)
        for key in ("freeze_router", "balance", "replay_routing"):
            if model.experts is None and getattr(moe, key) != getattr(MoeConfig(), key):
                yield Problem(f"learner.moe.{key}", "its default, since the model has no experts")
    yield from lora_problems(config, model)
    if "tasks.dataset" in read:
        for key, path in config.tasks.datasets.items():
            yield from _dataset(key, path)
    if config.learner.world_size % config.learner.machines:
        expected = f"a divisor of learner.world_size ({config.learner.world_size})"
        yield Problem("learner.machines", expected, hint="every machine runs as many ranks")
    if config.rl is not None:
        yield from _job_problems(config.rl, read, model)
        return
    if moe.replay_routing:
        hint = "no engine has routed these tokens before"
        yield Problem("learner.moe.replay_routing", "false in a warm start", hint=hint)
    yield from address_problems(config.broker)


def size_problems(config: BaseConfig) -> Iterator[Problem]:
    """Sizes that no job has, and that no plan could be counted for."""
    rows = config.learner.rows_per_step
    sizes = {"learner.world_size": config.learner.world_size, f"learner.{config.learner.step_key}": rows}
    if config.learner.lora is not None:
        sizes["learner.lora.rank"] = config.learner.lora.rank
    if config.rl is not None:
        sizes["rollout.nodes"] = config.rl.rollout.nodes
    for key, size in sizes.items():
        if size > MOST_LISTED:
            yield Problem(key, f"at most {MOST_LISTED}")
    if config.rl is not None and rows <= MOST_LISTED < rows * config.rl.rollout.group_size:
        expected = f"at most {MOST_LISTED // rows}, since a step has {rows} groups"
        yield Problem("rollout.group_size", expected)


def _job_problems(config: Config, read: set[str], model: Architecture | None) -> Iterator[Problem]:
    yield from _evaluation(config, read)
    yield from _sources(config, read)
    for at, part in config.tasks.parts.items():
        python = part.limits.python
        if python is not None and "tasks.limits.python" in read and shutil.which(python) is None:
            yield Problem(f"{at}.limits.python", "a Python interpreter", f"{python}, which cannot be run")
    for name, scorer in config.scorers.items() if "tasks.limits.python" in read else ():
        if variable := scorer.problem_of_key:
            hint = "export it where the node starts"
            yield Problem(f"scorers.{name}.api_key_env", "a variable that is set", f"{variable}, which is not", hint)
    yield from _losses(config)
    yield from critic_problems(config, model)
    critic = config.learner.critic
    if critic is not None and critic.path and "learner.critic.path" in read and not critic.path.startswith(SCHEME):
        yield from _critic(critic.path)
    reference = config.learner.loss.reference
    if reference is not None and "learner.loss.reference" in read and not reference.startswith(SCHEME):
        yield from _reference(Path(reference))
    yield from _rollout(config, model)
    limit = config.staleness.max + 1
    if config.weights.publish_every > limit:
        hint = "nodes would wait for weights that the learner only makes from their groups"
        yield Problem("weights.publish_every", f"at most staleness.max + 1 = {limit}", hint=hint)
    yield from broker_problems(config)
    yield from weights_address_problems(config)
    if "tasks.dataset" in read:
        yield from buffers_problems(config)
    if model is not None and config.learner.moe.replay_routing:
        # a group's routing must fit into the message that brings it
        each, longest, size = routing_bytes(model), config.rollout.engine.max_model_len, config.rollout.group_size
        needed = size * longest * each
        if needed > config.broker.max_message_bytes:
            hint = f"learner.moe.replay_routing: {size} samples x {longest} tokens x {each} bytes for their experts"
            yield Problem("broker.max_message_bytes", f"more than {needed} for the routing of a group", hint=hint)


def metric_names(config: BaseConfig) -> list[str]:
    """The metrics of this run by which versions can be compared, those of its evaluations included."""
    known = numbers(config.step_metrics)
    if config.rl and config.evaluation.every:
        told = config.rl.evaluation
        figures = ["mean_reward", *(f"pass_at/{k}" for k in pass_ks(told.samples))]
        known += [f"evaluation/{name}/{each}" for name in dataset_names(told.paths) for each in figures]
    return known


def source_metrics(config: BaseConfig) -> list[str]:
    """The metrics of each of tasks.sources; docs/mixtures.md."""
    sources = config.rl.tasks.sources if config.rl else ()
    return [f"sources/{name}/{each}" for name in sources for each in SOURCE_FIGURES]


def _keep_best(config: BaseConfig) -> Iterator[Problem]:
    key = config.learner.checkpoint.keep_best
    if key is None:
        return
    known = metric_names(config)
    name = key.removeprefix("-")
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean '{'-' * key.startswith('-')}{near}'?" if near else "docs/metrics.md lists them"
        if config.rl and not config.evaluation.every and name.startswith("evaluation/"):
            hint = "it needs evaluation.every"
        yield Problem("learner.checkpoint.keep_best", "a metric of this run, or -METRIC for the least", hint=hint)


def model_folder_problems(path: str) -> Generator[Problem, None, Architecture | None]:
    """Why the folder of `model.path` cannot be used; returns its shape, None where config.json does not give it."""
    folder = Path(path)
    key = "model.path"
    expected = "a Hugging Face model folder"
    if path.startswith(SCHEME):
        return None
    try:
        if not folder.is_dir():
            found = f"{path}, which is a file" if folder.is_file() else f"{path}, which does not exist"
            yield Problem(key, expected, found, MODEL_HINT)
            return None
        document = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    except (OSError, ValueError) as error:
        yield Problem(key, f"{expected} with a readable config.json", f"{path}: {error}")
        return None
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        expected_files = f"{expected} with a tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...)"
        yield Problem(key, expected_files, f"{path} without one", kind="missing")
    if is_converted(folder):
        yield from _converted(key, folder)
    elif not any(folder.glob("*.safetensors")):
        yield Problem(key, f"{expected} with weights (*.safetensors)", f"{path} without any", kind="missing")
    yield from architecture_problems(document.get)
    try:
        return read_architecture(document)
    except UnknownArchitecture as error:
        if document.get("architectures"):  # it is one that is supported, so a number is missing
            yield Problem(key, f"{expected} with a complete config.json", f"{path}: {error}")
        return None


def _converted(key: str, folder: Path) -> Iterator[Problem]:
    try:
        read_converted(folder)
    except UsageError as error:
        yield Problem(key, "a whole folder of `slipstream convert`", str(error), kind="missing")


def _reference(folder: Path) -> Iterator[Problem]:
    key = "learner.loss.reference"
    if is_converted(folder):
        yield from _converted(key, folder)
        return
    for name in ("config.json", "*.safetensors"):
        if not any(folder.glob(name)):
            yield Problem(key, "a Hugging Face model folder", f"{folder} without {name}")


def _critic(path: str) -> Iterator[Problem]:
    """Why a folder has neither a model nor a critic."""
    key = "learner.critic.path"
    folder = Path(path)
    try:
        critic = is_critic(folder)
    except (OSError, ValueError) as error:
        yield Problem(key, "a Hugging Face model folder or a critic's", f"{path}: {error}")
        return
    if critic and not any(folder.glob("*.safetensors")):
        yield Problem(key, "a critic's folder with weights (*.safetensors)", f"{path} without any", kind="missing")
    elif critic:
        try:
            labels = labels_of(folder)
        except (OSError, ValueError, KeyError) as error:
            yield Problem(key, "a critic's folder with weights that can be read", f"{path}: {error}")
            return
        if labels != 1:
            found = f"{path}, whose {SCORE} has {labels}" if labels else f"{path} without {SCORE}"
            yield Problem(key, "a critic with one label", found)
    for problem in () if critic else model_folder_problems(path):
        yield replace(problem, key=key)


def _dataset(key: str, path: str) -> Iterator[Problem]:
    file = Path(path)
    if path.startswith(SCHEME):
        return
    if not dataset_exists(file):
        if file.is_dir():
            yield Problem(key, "a JSONL or parquet file", f"{path}, a folder", _files_inside(file))
            return
        found = f"{path}, which does not exist"
        yield Problem(key, "a JSONL or parquet file", found, DATASET_HINT, kind="missing")
        return
    try:
        for _ in islice(dataset_rows(file, key), FIRST_ROWS):
            pass
    except OtherFormat as error:
        yield error.problem
    except UsageError as error:
        expected = "a whole parquet file" if file.suffix == ".parquet" else "a JSON object on every line"
        yield Problem(key, expected, str(error).removeprefix(f"{key}: "))


def _files_inside(folder: Path) -> str:
    """A hint with a pattern for files of a dataset that are in the folder, or in a folder of it."""
    for kind in (f"{depth}*.{ending}" for depth in ("", "*/") for ending in ("parquet", "jsonl")):
        if found := min(folder.glob(kind), default=None):
            return f"several files are {found.parent}/*{found.suffix}"
    return "it has neither *.parquet nor *.jsonl"


def _sources(config: Config, read: set[str]) -> Iterator[Problem]:
    """Limits of sources, held-out problems of each, and rows that are left out by their success rate."""
    rollout = config.rollout
    sources = config.tasks.sources
    for name, source in sources.items():
        for key, most in (("max_tokens", rollout.max_tokens), ("max_turns", rollout.max_turns)):
            found = getattr(source, key)
            if found is not None and most is not None and found > most:
                yield Problem(f"tasks.sources.{name}.{key}", f"at most rollout.{key} ({most})", f"{found}")
    datasets = config.evaluation.datasets
    if bool(sources) != isinstance(datasets, dict) and datasets:
        expected = "a mapping of the names in tasks.sources to lists" if sources else "a list, without tasks.sources"
        yield Problem("evaluation.datasets", expected, describe_value(datasets))
    for name in datasets if sources and isinstance(datasets, dict) else ():
        if name not in sources:
            hint = meant(name, sources, f"tasks.sources has {', '.join(sources)}")
            yield Problem(f"evaluation.datasets.{name}", "the name of one of tasks.sources", name, hint)
    expected = "a metric of one of tasks.sources"
    yield from _watched(
        config, "sources/", source_metrics(config), expected=expected, page="docs/mixtures.md lists them"
    )
    for number, rule in enumerate(config.watch):
        kind, name = [*rule.metric.split("/"), ""][:2]
        if sources and kind == "environment" and name not in sources:
            hint = f"tasks.sources has {', '.join(sources)}"
            yield Problem(f"watch[{number}].metric", "environment/SOURCE/NAME with tasks.sources", rule.metric, hint)
    for at, part in config.tasks.parts.items():
        if part.filters and "tasks.dataset" in read and dataset_exists(Path(part.dataset)):
            try:
                kept_rows(part, "its rows")
            except UsageError as error:
                expected = f"rows with a success rate in the column '{part.success_column}', some within the bounds"
                yield Problem(f"{at}.dataset", expected, str(error))


def _watched(config: Config, prefix: str, known: list[str], *, expected: str, page: str) -> Iterator[Problem]:
    """Watch rules on metrics with this prefix that the run will not have; `page` says where they are listed."""
    for number, rule in enumerate(config.watch):
        if rule.metric.startswith(prefix) and rule.metric not in known:
            hint = meant(rule.metric, known, page)
            yield Problem(f"watch[{number}].metric", expected, rule.metric, hint)


def _evaluation(config: Config, read: set[str]) -> Iterator[Problem]:
    told = config.evaluation
    publish_every = config.weights.publish_every
    for dataset in told.paths if "evaluation.datasets" in read else ():
        yield from _dataset("evaluation.datasets", dataset)
    if len(set(told.paths)) < len(told.paths):
        yield Problem("evaluation.datasets", "every dataset once")
    if told.every and not told.paths:
        yield Problem("evaluation.datasets", "at least one dataset with evaluation.every")
    if told.every % publish_every:
        hint = "only a published version reaches the nodes"
        yield Problem("evaluation.every", f"a multiple of weights.publish_every ({publish_every})", hint=hint)
    figures = [*numbers(EvaluationMetrics), "mean_reward_low", "mean_reward_high"]
    known = [f"evaluation/{name}/{each}" for name in dataset_names(told.paths) for each in figures]
    if told.every:
        expected = "a number of this run's evaluations"
        yield from _watched(config, "evaluation/", known, expected=expected, page="docs/watch.md has the names")
    if told.temperature and not LOWEST_TEMPERATURE <= told.temperature <= HIGHEST_TEMPERATURE:
        yield Problem("evaluation.temperature", f"0 (greedy), or {LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE:g}")


def _losses(config: Config) -> Iterator[Problem]:
    loss = config.learner.loss
    yield from loss_problems(loss, config.measures_kl)
    yield from update_problems(config)
    if loss.kl_coefficient and not any(job.learner.loss.kl_coefficient for job in config.sources.values()):
        expected = "0, since every one of tasks.sources has 0"
        yield Problem("learner.loss.kl_coefficient", expected, hint="no reference is loaded, so none can be compared")
    for at, job in zip(config.tasks.sources or ("",), config.sources.values(), strict=True):
        yield from advantage_problems(f"tasks.sources.{at}" if at else "learner.loss", job)
    estimators = {job.learner.loss.advantage for job in config.sources.values()}
    for name in sorted(estimators & {*OVER_THE_BATCH}) if config.learner.dynamic_sampling else ():
        hint = "rewards are compared over the batch, so groups whose rewards are all equal do carry signal"
        yield Problem("learner.dynamic_sampling", f"false with learner.loss.advantage: {name}", hint=hint)
    if loss.distillation is not None:
        if config.learner.dynamic_sampling:
            hint = "groups whose rewards are all equal carry the teacher's signal"
            yield Problem("learner.dynamic_sampling", "false with learner.loss.distillation", hint=hint)
        if config.rollout.temperature != 1:
            hint = "a teacher's log-probabilities know no temperature"
            yield Problem("rollout.temperature", "1 with learner.loss.distillation", hint=hint)
    drops = loss.correction == "mis" or is_plugin(loss.correction)
    drops = drops or loss.correction_normalize or loss.correction_veto is not None
    if config.learner.moe.balance == "aux_loss" and drops:
        expected = "bias or none with correction mis or 'module:function', correction_normalize or correction_veto"
        hint = "what these leave out is known after the forward pass only: the auxiliary loss would get an odd weight"
        yield Problem("learner.moe.balance", expected, hint=hint)


def _rollout(config: Config, model: Architecture | None) -> Iterator[Problem]:
    rollout = config.rollout
    engine = config.rollout.engine
    named = {job.learner.loss.advantage for job in config.sources.values()}
    others = {name for name in named if name not in OF_ONE and not is_plugin(name)}
    if rollout.group_size == 1 and others and config.learner.loss.trains_on_rewards:
        hint = "a group of one has nothing to be compared with: every advantage would be zero"
        yield Problem("rollout.group_size", f"at least 2 with learner.loss.advantage: {min(others)}", hint=hint)
    if rollout.max_tokens >= engine.max_model_len:
        expected = f"less than rollout.engine.max_model_len ({engine.max_model_len}), which includes the prompt"
        yield Problem("rollout.max_tokens", expected)
    for at, job in zip(config.tasks.parts, config.sources.values(), strict=True):
        most = job.rollout.max_tokens
        if (found := job.tasks.overlong_buffer_tokens or 0) > most:
            yield Problem(f"{at}.overlong_buffer_tokens", f"at most rollout.max_tokens ({most})", f"{found}")
    if model is not None and engine.max_model_len > model.positions:
        expected = f"at most the model's max_position_embeddings ({model.positions})"
        yield Problem("rollout.engine.max_model_len", expected)
    longest = engine.max_model_len - 1  # a sequence trains one place fewer than it has tokens
    needed = padded(longest, config.learner.parallel)
    if config.learner.micro_batch_tokens < needed:
        multiple = document_multiple(config.learner.parallel)
        rounded = f", rounded up to a multiple of {multiple} for learner.parallel.context," if multiple > 1 else ""
        least = f"at least rollout.engine.max_model_len - 1{rounded} ({needed})"
        yield Problem("learner.micro_batch_tokens", f"{least}, or a long sample could not be trained on")
    if config.weights.canary_tokens > longest:
        yield Problem("weights.canary_tokens", f"at most rollout.engine.max_model_len - 1 ({longest})")
    if rollout.concurrency_bounds[1] < rollout.group_size:
        expected = f"at least rollout.group_size ({rollout.group_size}), or no group could finish"
        yield Problem("rollout.concurrency", expected)
    if rollout.temperature < LOWEST_TEMPERATURE:
        hint = "below it sampling is greedy and log-probabilities say nothing"
        yield Problem("rollout.temperature", f"at least {LOWEST_TEMPERATURE}", hint=hint)
    if rollout.temperature > HIGHEST_TEMPERATURE:
        yield Problem("rollout.temperature", f"at most {HIGHEST_TEMPERATURE:g}", hint="vLLM samples at none above it")
    if rollout.top_p < 1:
        hint = "the sampler's log-probabilities would be those of a cut distribution: importance ratios come out biased"
        yield Problem("rollout.top_p", "1 in training", hint=hint)
    yield from quantization_problems(engine, model)
    yield from engine_step_problems(engine)
    if engine.pipeline_parallel > 1 and config.learner.moe.replay_routing:
        hint = "vLLM does not return the experts that later stages chose"
        yield Problem("rollout.engine.pipeline_parallel", "1 with learner.moe.replay_routing", hint=hint)
    if model is not None and engine.expert_parallel and model.experts is None:
        yield Problem("rollout.engine.expert_parallel", "false, since the model has no experts")
    if model is not None and (heads := model.attention.heads) % engine.tensor_parallel:
        yield Problem("rollout.engine.tensor_parallel", f"a divisor of the model's {heads} attention heads")
