"""The runs of a sweep: every combination of the values of its keys, all checked before the first run starts.

An arm is one combination of values without run.seed. Its runs differ in the seed only.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from common.config.loading import OVERRIDE, load_either, values_of
from common.config.schema import BaseConfig
from common.errors import ConfigError
from common.process.run_dir import RunDir
from launch.cluster.slurm.submit import reviewed
from launch.up.up import ready

SEED = "run.seed"
OWN = ("run.name", "run.dir")  # the sweep sets them for each run
MOST_OF_A_NAME = 150  # characters


class Entry(msgspec.Struct, frozen=True):
    """A run of a sweep, as DIR/sweep.json has it."""

    name: str  # DIR/NAME is its folder
    values: dict[str, Any]  # those of its arm, by key, as the config has them
    seed: int


class Planned(NamedTuple):
    """A run that has passed all checks."""

    entry: Entry
    overrides: list[str]
    config: BaseConfig
    run: RunDir


def texts_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each word key=a,b,c as they were typed; raises ConfigError."""
    found: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key in OWN or key in found:
            raise ConfigError(OVERRIDE, key, "every key once, and not those that the sweep sets", word)
        try:
            found[key] = values_of(text)
        except yaml.YAMLError:
            found[key] = []
        if not found[key]:
            hint = "put quotes around a value that has commas, brackets or quotes itself"
            raise ConfigError(OVERRIDE, key, "values with commas between them", repr(text), hint)
    return found


def combined(file: str, words: Sequence[str], seeds: int | None) -> tuple[dict[str, list[str]], BaseConfig]:
    """The values of each key, with `seeds` values of run.seed from the config's on; the first combination's config.

    Raises UsageError, also when there is a single combination.
    """
    texts = texts_of(words)
    first = load_either(Path(file), [f"{key}={found[0]}" for key, found in texts.items()])
    if seeds is not None:
        if SEED in texts or seeds < 1:
            raise ConfigError(OVERRIDE, SEED, "at least one seed, from --seeds or from this key", f"--seeds {seeds}")
        texts[SEED] = [str(first.run.seed + number) for number in range(seeds)]
    if all(len(found) == 1 for found in texts.values()):
        hint = "for example learner.optimizer.lr=1e-6,3e-6, or --seeds 3"
        raise ConfigError(OVERRIDE, "key=a,b,c", "a key with several values", "none", hint)
    return texts, first


def plan(file: str, texts: Mapping[str, Sequence[str]], folder: Path, slurm: bool = False) -> list[Planned]:
    """The runs in the order of the words. Raises UsageError for the first one that cannot run."""
    found: dict[str, Planned] = {}
    for combination in itertools.product(*texts.values()):
        overrides = [f"{key}={text}" for key, text in zip(texts, combination, strict=True)]
        config = load_either(Path(file), overrides)
        document = msgspec.to_builtins(config)
        swept = [key for key in texts if len(texts[key]) > 1]
        values = {key: reduce(lambda at, part: at[part], key.split("."), document) for key in swept}
        name = name_of(values)
        if name in found:
            raise ConfigError(OVERRIDE, "key=a,b,c", "every combination once", f"{name} twice")
        if config.learner.checkpoint.dir is not None:
            hint = "every run of a sweep needs checkpoints of its own"
            raise ConfigError(file, "learner.checkpoint.dir", "unset", config.learner.checkpoint.dir, hint)
        values.pop(SEED, None)
        own = {"run.name": f"{config.run.name}-{name}", "run.dir": str(folder / name)}
        overrides += [f"{key}={msgspec.json.encode(value).decode()}" for key, value in own.items()]
        if slurm:
            config, run, _ = reviewed(file, overrides)
        else:
            config, run = ready(load_either(Path(file), overrides), f"{file} with {name}")
        found[name] = Planned(Entry(name, values, config.run.seed), overrides, config, run)
    return list(found.values())


def name_of(values: Mapping[str, Any]) -> str:
    """A name for files that follows from the values, for example lr=1e-6,group_size=8; with a digest if it is cut."""
    texts = [value if isinstance(value, str) else msgspec.json.encode(value).decode() for value in values.values()]
    name = ",".join(f"{key.rpartition('.')[2]}={text}" for key, text in zip(values, texts, strict=True))
    safe = re.sub(r"[^\w.+=,-]+", "-", name, flags=re.ASCII)[:MOST_OF_A_NAME]
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
