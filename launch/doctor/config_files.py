"""Doctor: the files that a config names: the model's weights, the dataset, credentials."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from common.config.schema import Config, SftConfig
from common.errors import UsageError
from common.json_lines import dataset_rows
from common.security.credentials import KeyFolder
from launch.doctor.findings import Finding, fine, problem, warning
from launch.plan.review import TOO_FEW_TURNS, TOO_FEW_TURNS_WHY, Review
from rollout_fleet.environments.description import PYTHON_KEY

ENVIRONMENT_KEYS = ("tasks.environment", "tasks.options", PYTHON_KEY)
INDEX = "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20
LFS = b"version https://git-lfs"
SHOWN = 4  # names in one finding
READ_BYTES = 64 << 20  # the part of a dataset that is read
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
    if review.too_few_turns:
        yield warning("environment", TOO_FEW_TURNS, TOO_FEW_TURNS_WHY, "a larger rollout.max_turns")
    yield from check_model(Path(config.model.path))
    yield from check_dataset("tasks.dataset", Path(config.tasks.dataset), config)
    if isinstance(config, Config) and config.broker.credentials is not None:
        yield from check_permissions(Path(config.broker.credentials))


def check_model(folder: Path) -> Iterator[Finding]:
    """Every safetensors file is whole, and every one that the index names is there."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return  # said by the config's checks
    missing, unreadable = missing_shards(folder)
    broken = [f"{file.name}: {reason}" for file in files if (reason := broken_weights(file))]
    found = {
        unreadable: "weights cannot be found by name",
        f"{folder} lacks {_first(missing)}" * bool(missing): f"{INDEX} says that tensors are in them",
        _first(broken): "a download that was cut off, most likely",
    }
    found.pop("", None)
    for what, why in found.items():
        yield problem("model", what, why, GET_AGAIN)
    if not found:
        size = sum(file.stat().st_size for file in files) / (1 << 30)
        yield fine("model", f"{len(files)} file{'s' * (len(files) > 1)} of weights, {size:.2f} GiB, all whole")


def _first(names: Sequence[object]) -> str:
    """Some names of many."""
    more = [f"and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
    return ", ".join([*map(str, names[:SHOWN]), *more])


def broken_weights(file: Path) -> str:
    """Why a safetensors file cannot be whole, from its header and its size; '' when it can."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            if (start + opened.read(len(LFS) - 8)) == LFS:
                return "a pointer of git-lfs, not the file (git lfs pull)"
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                return f"no safetensors file of {size:,} bytes"
            opened.seek(8)
            header: object = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    try:
        tensors = msgspec.convert(header, dict[str, dict[str, object]])
        ends = [
            msgspec.convert(t["data_offsets"], tuple[int, int])[1] for n, t in tensors.items() if n != "__metadata__"
        ]
    except (KeyError, msgspec.ValidationError) as error:
        return f"its header does not describe tensors: {error}"
    expected = 8 + length + max(ends, default=0)
    return "" if size == expected else f"{size:,} bytes, {expected:,} expected"


class _Index(msgspec.Struct, frozen=True):
    """The file of each tensor, by the tensor's name."""

    weight_map: dict[str, str]


def missing_shards(folder: Path) -> tuple[list[str], str]:
    """(files that the index names and that are not there, why the index cannot be read)."""
    index = folder / INDEX
    if not index.is_file():
        return [], ""
    try:
        found = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        return [], f"{index} cannot be read: {error}"
    return sorted(name for name in set(found.weight_map.values()) if not (folder / name).is_file()), ""


def check_dataset(key: str, file: Path, config: Config | SftConfig) -> Iterator[Finding]:
    """Every line is a JSON object, and a step finds enough of them."""
    if not file.is_file():
        return  # said by the config's checks
    try:
        rows, whole = count_rows(file, key)
    except UsageError as error:
        why = "a task is one JSON object on a line of its own"
        yield problem("dataset", str(error), why, "make the file readable; fix or remove the line")
        return
    wanted = config.learner.groups_per_step if isinstance(config, Config) else config.learner.sequences_per_step
    shown = f"{rows:,} rows" + ("" if whole else f" in the first {READ_BYTES >> 20} MiB")
    if rows < wanted and whole:
        why = f"a step takes {wanted}, so each would see some of them twice"
        yield warning("dataset", f"{key}: {shown}", why, "more rows, or a smaller learner.groups_per_step")
    else:
        yield fine("dataset", f"{key}: {shown}")


def count_rows(file: Path, key: str) -> tuple[int, bool]:
    """(rows, whether the file was read to its end); raises UsageError as `dataset_rows` does."""
    rows = read = 0
    for rows, (_, row) in enumerate(dataset_rows(file, key), start=1):
        read += len(row)
        if read > READ_BYTES:
            return rows, False
    return rows, True


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
        why = "who reads a key can speak in the name of its role"
        yield problem(
            "credentials", f"others may read {_first(shared)}", why, f"chmod 600 {' '.join(map(str, shared))}"
        )
    if unreadable:
        why = "the role cannot prove who it is"
        yield problem("credentials", f"{_first(unreadable)} cannot be read", why, "chown it")
    if not shared and not unreadable:
        yield fine("credentials", f"{len(secret)} files, their owner's alone")
