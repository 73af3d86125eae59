"""Doctor: the files that a config names: the model's weights, the dataset, credentials."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import msgspec

from common.config.schema import BaseConfig, Config
from common.errors import SlipstreamError, UsageError
from common.json_lines import dataset_files, dataset_rows
from common.security.credentials import KeyFolder
from launch.doctor.findings import Finding, few, fine, problem, warning
from launch.plan.review import Review
from rollout_fleet.environments.description import PYTHON_KEY, Description
from rollout_fleet.environments.protocol import Chat

ENVIRONMENT_KEYS = ("tasks.environment", "tasks.options", PYTHON_KEY)
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
LFS = b"version https://git-lfs"
READ_BYTES = 64 << 20  # the part of a dataset that is read
ROW_CHARS = 300  # a longer row is cut where it is shown
GET_AGAIN = "get it again: `hf download NAME --local-dir FOLDER`"


def check_config_and_files(review: Review) -> Iterator[Finding]:
    """Everything that a launch would refuse, then the content of the files, which a launch reads too late."""
    config, file = review.config, review.file
    refused = [*review.refused, *review.missing]
    for key, expected, found, hint in refused:
        of_environment = key in ENVIRONMENT_KEYS
        check = "environment" if of_environment else "config"
        fix = hint or ("install it where the rollout nodes run" if of_environment else f"set {key} in the config")
        yield problem(check, f"{file}: {key}: found {found}", f"expected {expected}", fix)
    if not refused:
        yield fine("config", f"{file} passes the checks of a launch")
    yield from check_model(Path(config.model.path))
    yield from check_dataset("tasks.dataset", Path(config.tasks.dataset), config)
    if config.rl is not None and review.environment is not None and not review.environment.agent:
        yield from check_first_row(config.rl, review.environment)
    if config.rl is not None and config.broker.credentials is not None:
        yield from check_permissions(Path(config.broker.credentials))


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]  # the file of each tensor, by the tensor's name


def check_model(folder: Path) -> Iterator[Finding]:
    """Every safetensors file is whole, and every one that the index names is there."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return  # said by the config's checks
    found, index = list[Finding](), folder / INDEX
    try:
        names = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values() if index.is_file() else ()
        if missing := sorted(name for name in set(names) if not (folder / name).is_file()):
            why = f"{INDEX} says that tensors are in them"
            found.append(problem("model", f"{folder} lacks {few(missing)}", why, GET_AGAIN))
    except (OSError, msgspec.DecodeError) as error:
        found.append(problem("model", f"{index} cannot be read: {error}", "weights cannot be found by name", GET_AGAIN))
    if broken := [f"{file.name}: {reason}" for file in files if (reason := broken_weights(file))]:
        found.append(problem("model", few(broken), "a download that was cut off, most likely", GET_AGAIN))
    yield from found
    if not found:
        size = sum(file.stat().st_size for file in files) / (1 << 30)
        yield fine("model", f"{len(files)} file{'s' * (len(files) > 1)} of weights, {size:.2f} GiB, all whole")


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def broken_weights(file: Path) -> str:
    """Why a safetensors file cannot be whole, from its header and its size; '' when it can."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(LFS))
            if start == LFS:
                return "a pointer of git-lfs, not the file (git lfs pull)"
            length = int.from_bytes(start[:8], "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                return f"no safetensors file of {size:,} bytes"
            opened.seek(8)
            header = msgspec.json.decode(opened.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        ends = [msgspec.json.decode(tensor, type=_Tensor).data_offsets[1] for tensor in header.values()]
    except OSError as error:
        return f"cannot be read: {error}"
    except ValueError as error:
        return f"its header does not describe tensors: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{size:,} bytes, {expected:,} expected"


def check_dataset(key: str, file: Path, config: BaseConfig) -> Iterator[Finding]:
    """Every line is a JSON object, and a step finds enough of them."""
    if not any(map(Path.is_file, dataset_files(file))):
        return  # said by the config's checks, or a name of the hub
    rows, read = 0, 0
    try:
        for _, row in dataset_rows(file, key):
            rows, read = rows + 1, read + len(row)
            if read > READ_BYTES:
                break
    except UsageError as error:
        why = "a task is one JSON object on a line of its own, or a row of a parquet file"
        yield problem("dataset", str(error), why, "make the file readable; fix or remove the line")
        return
    wanted = config.learner.rows_per_step
    whole = read <= READ_BYTES
    shown = f"{rows:,} rows" + ("" if whole else f" in the first {READ_BYTES >> 20} MiB")
    if rows < wanted and whole:
        why = f"a step takes {wanted}, so each would see some of them twice"
        yield warning("dataset", f"{key}: {shown}", why, "more rows, or a smaller learner.groups_per_step")
    else:
        yield fine("dataset", f"{key}: {shown}")


def check_first_row(config: Config, environment: Description) -> Iterator[Finding]:
    """The environment of the dataset's first row is built and reset, as in an episode."""
    from rollout_fleet.driver_factory import first_observation
    from rollout_fleet.episode.driver import EpisodeFailed

    name, reason, said = config.tasks.environment, "", None
    try:
        where, row = next(dataset_rows(Path(config.tasks.dataset), "tasks.dataset"))
    except UsageError:
        return  # said by the config's checks, or a name of the hub
    try:
        with redirect_stdout(sys.stderr):  # the findings alone go to standard output
            said = asyncio.run(first_observation(config, environment, msgspec.json.decode(row)))
        if not isinstance(said, str | list | Chat):
            reason = f"reset returned {type(said).__name__}, expected a text, token ids or a Chat"
    except (EpisodeFailed, SlipstreamError) as error:
        reason = str(error)
    if reason:
        why = f"every sample of such a row would fail; {where}: {row.decode(errors='replace')[:ROW_CHARS]}"
        fix = "a dataset whose rows are as the environment reads them, or an environment that reads these"
        yield problem("environment", f"{name} fails on the first row of tasks.dataset: {reason}", why, fix)
    else:
        yield fine("environment", f"{name} begins on the first row of tasks.dataset")


def check_permissions(path: Path) -> Iterator[Finding]:
    """Secret keys are their owner's alone; `path` is a key folder or one credential."""
    if not path.exists():
        return  # said by the config's checks
    folder = KeyFolder(path)
    files = [path] if path.is_file() else [folder.server, *folder.client_files(), *path.glob("*.password")]
    secret = [file for file in files if file.exists()]
    shared = [file for file in secret if file.stat().st_mode & 0o077]
    unreadable = [file for file in secret if not os.access(file, os.R_OK)]
    if shared:
        why, fix = "who reads a key can speak in the name of its role", f"chmod 600 {' '.join(map(str, shared))}"
        yield problem("credentials", f"others may read {few(shared)}", why, fix)
    if unreadable:
        why = "the role cannot prove who it is"
        yield problem("credentials", f"{few(unreadable)} cannot be read", why, "chown it")
    if not shared and not unreadable:
        yield fine("credentials", f"{len(secret)} files, their owner's alone")
