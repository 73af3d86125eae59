"""Load a YAML config strictly: what a person mistyped is named with its file, key path and nearest valid name.

The schema is walked next to the document, so that every message can say what would have been accepted
there. `key.path=value` overrides are typed as YAML, applied before the walk and named as '<override>'.
"""

import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import yaml
from msgspec import inspect as schema_info

from common.config import strict_yaml
from common.config.schema import Config, SftConfig
from common.config.strict_yaml import Document
from common.errors import ConfigError, UsageError

OVERRIDE = "<override>"
MOST_INTEGER = 1 << 53  # what travels as a number and stays exact
MOST_BITS_SHOWN = 256
S = TypeVar("S", bound=msgspec.Struct)


def read_document(path: Path) -> Document:
    """The YAML mapping in `path`; raises UsageError when it cannot be read, ConfigError when it is malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"config file {path} does not exist{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; expected a config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} cannot be read: {error}") from None
    return strict_yaml.parse_mapping(text, str(path))


def load_config(path: Path, overrides: Sequence[str] = (), schema: type[S] = Config) -> S:
    """Read, override and check one config file.

    Args:
        path: the YAML file.
        overrides: `key.path=value` words; values are typed as YAML, later ones win.
        schema: Config (an RL job) or SftConfig (a supervised warm start).

    Returns:
        The frozen config. Checks that need more than one key are in common/config/checks.py.

    Raises:
        UsageError: the file cannot be read or an override is not `key=value`.
        ConfigError: names file (or '<override>'), key path, what was expected, what was found, the nearest key.
    """
    return build_config(read_document(path), str(path), overrides, schema)


def build_config(document: Document, file: str, overrides: Sequence[str] = (), schema: type[S] = Config) -> S:
    """A config from what YAML or JSON gave; `file` is named in errors. Arguments and raises as `load_config`."""
    if schema is Config and _looks_like_sft(document):
        raise UsageError(f"{file} is a config of `slipstream sft`: tasks has no environment and there is no rollout")
    if schema is SftConfig and "rollout" in document:
        raise UsageError(f"{file} is a config of `slipstream up`: a warm start has no rollout")
    overridden = {_apply_override(document, word, schema) for word in overrides}
    _check_struct(document, schema, "", _Source(file, overridden, schema))
    try:
        return msgspec.convert(document, schema)
    except msgspec.ValidationError as error:  # unreachable while the walk above covers the schema
        raise ConfigError(file, "the document", "a valid config", str(error)) from None


def load_either(path: Path, overrides: Sequence[str] = ()) -> Config | SftConfig:
    """An RL or a warm-start config, whichever `path` holds; raises as `load_config`."""
    if _looks_like_sft(read_document(path)):
        return load_config(path, overrides, SftConfig)
    return load_config(path, overrides, Config)


def dump_yaml(config: msgspec.Struct) -> str:
    """The complete resolved config, every default written out; `load_config` reads it back equal."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None when nothing is close."""
    by_lower = {c.lower(): c for c in choices}
    hits = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[hits[0]] if hits else None


class _Source:
    """Which file, or which override, a key came from."""

    def __init__(self, file: str, overridden: set[str], schema: type[msgspec.Struct]) -> None:
        self.file, self.overridden, self.schema = file, overridden, schema

    def of(self, key: str) -> str:
        hit = any(key == o or key.startswith(o + ".") for o in self.overridden)
        return OVERRIDE if hit else self.file


def _looks_like_sft(document: Document) -> bool:
    tasks: object = document.get("tasks")
    has_environment = isinstance(tasks, dict) and "environment" in tasks
    learner: object = document.get("learner")
    has_sequences = isinstance(learner, dict) and "sequences_per_step" in learner
    return "rollout" not in document and not has_environment and (has_sequences or "tasks" in document)


def _apply_override(document: Document, word: str, schema: type[msgspec.Struct]) -> str:
    """Write one `key.path=value` into `document`; returns the key path."""
    key, equals, text = word.partition("=")
    if not equals or not key or any(not part for part in key.split(".")):
        raise UsageError(f"override {word!r}: expected key.path=value, for example run.steps=40")
    kind = _field_type(key, schema)
    value = _override_value(text, key)
    if isinstance(kind, schema_info.StrType) and not isinstance(value, str):
        value = text  # run.name=2026 means the text
    section, *_ = parts = key.split(".")
    target = document
    for part in parts[:-1]:
        section = part
        below = target.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(OVERRIDE, key, f"a section at '{section}'", describe_value(below))
        target = cast("Document", below)
    target[parts[-1]] = value
    return key


def _override_value(text: str, key: str) -> object:
    try:
        return strict_yaml.load(text)
    except yaml.YAMLError:
        raise ConfigError(OVERRIDE, key, "a YAML value", repr(text), "put quotes around the value") from None


def _field_type(key: str, schema: type[msgspec.Struct]) -> schema_info.Type:
    """The schema's type at a dotted path; raises ConfigError naming the nearest key."""
    kind: schema_info.Type = schema_info.type_info(schema)
    done: list[str] = []
    for part in key.split("."):
        if isinstance(kind, schema_info.StructType):
            fields = {f.name: f.type for f in kind.fields}
            if part not in fields:
                raise _unknown_key(OVERRIDE, ".".join([*done, part]), part, fields, schema)
            kind = fields[part]
        elif isinstance(kind, schema_info.DictType):
            kind = kind.value_type
        else:
            raise ConfigError(
                OVERRIDE, key, f"'{'.'.join(done)}' to be {describe_type(kind)}", f"the key '{part}' below it"
            )
        done.append(part)
    return kind


def _unknown_key(file: str, key: str, name: str, known: Iterable[str], schema: type[msgspec.Struct]) -> ConfigError:
    known = list(known)
    elsewhere = [path for path in key_paths(schema) if path.rpartition(".")[2] == name]
    near = elsewhere[0] if elsewhere else nearest(name, known)
    hint = f"did you mean '{near}'?" if near else f"known keys here: {', '.join(known)}"
    return ConfigError(file, key, "a known key", f"unknown key '{name}'", hint)


def key_paths(schema: type[msgspec.Struct], at: str = "") -> list[str]:
    """Every dotted key path of a schema, sections included, in the order of the schema."""
    out: list[str] = []
    for field in msgspec.structs.fields(schema):
        path = _join(at, field.name)
        out.append(path)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            out.extend(key_paths(field.type, path))
    return out


def _check_struct(value: object, schema: type[msgspec.Struct], at: str, source: _Source) -> None:
    if not isinstance(value, dict):
        keys = ", ".join(f.name for f in msgspec.structs.fields(schema))
        raise ConfigError(source.of(at), at, f"a section with the keys {keys}", describe_value(value))
    document = cast("Document", value)
    info = schema_info.type_info(schema)
    assert isinstance(info, schema_info.StructType)
    fields = {f.name: f for f in info.fields}
    for name in document:
        if name not in fields:
            key = _join(at, name)
            raise _unknown_key(source.of(key), key, name, fields, source.schema)
    for name, field in fields.items():
        key = _join(at, name)
        if name not in document:
            if field.required:
                raise ConfigError(source.file, key, describe_type(field.type), "nothing", "this key is required")
            continue
        _check_value(document[name], field.type, key, source)


def _check_value(value: object, kind: schema_info.Type, key: str, source: _Source) -> None:
    if isinstance(kind, schema_info.StructType):
        _check_struct(value, kind.cls, key, source)
        return
    if isinstance(kind, schema_info.DictType):
        if not isinstance(value, dict):
            raise ConfigError(source.of(key), key, "a mapping", describe_value(value))
        for name, item in cast("Document", value).items():
            _check_value(item, kind.value_type, _join(key, name), source)
        return
    if not _fits(value, kind):
        hint = None
        if isinstance(kind, schema_info.LiteralType):
            near = nearest(str(value), (str(v) for v in kind.values))
            hint = f"did you mean '{near}'?" if near else None
        if isinstance(value, int) and abs(value) > MOST_INTEGER:
            hint = f"at most {MOST_INTEGER}"
        raise ConfigError(source.of(key), key, describe_type(kind), describe_value(value), hint)


def _fits(value: object, kind: schema_info.Type) -> bool:
    """Whether a leaf value has the type and lies in the range."""
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        return False
    if isinstance(kind, schema_info.UnionType):
        return any(_fits(value, k) for k in kind.types)
    if isinstance(kind, schema_info.LiteralType):
        return any(type(value) is type(v) and value == v for v in kind.values)
    if isinstance(kind, schema_info.NoneType):
        return value is None
    if isinstance(kind, schema_info.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, schema_info.IntType):
        return isinstance(value, int) and not isinstance(value, bool) and _in_range(value, kind)
    if isinstance(kind, schema_info.FloatType):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value) and _in_range(value, kind)
    if isinstance(kind, schema_info.StrType):
        return isinstance(value, str) and len(value) >= (kind.min_length or 0)
    raise TypeError(f"the config schema uses {kind}, which the loader does not know")


def _in_range(value: float, kind: schema_info.IntType | schema_info.FloatType) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def describe_type(kind: schema_info.Type) -> str:
    """A type in words, for example 'an integer >= 1' or 'one of keep, recompute'."""
    if isinstance(kind, schema_info.UnionType):
        return " or ".join(describe_type(k) for k in kind.types)
    if isinstance(kind, schema_info.LiteralType):
        return "one of " + ", ".join(str(v) for v in kind.values)
    if isinstance(kind, schema_info.IntType | schema_info.FloatType):
        word = "an integer" if isinstance(kind, schema_info.IntType) else "a number"
        bounds = [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
        return " ".join([word, " and ".join(f"{sign} {b}" for sign, b in bounds if b is not None)]).strip()
    names: dict[type[schema_info.Type], str] = {
        schema_info.StrType: "text",
        schema_info.BoolType: "true or false",
        schema_info.NoneType: "null",
        schema_info.StructType: "a section",
        schema_info.DictType: "a mapping",
    }
    return names.get(type(kind), type(kind).__name__)


def describe_value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, int) and value.bit_length() > MOST_BITS_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    words: dict[type, str] = {str: "text", int: "integer", float: "number"}
    return f"{value!r} ({words.get(type(value), type(value).__name__)})"


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _nearest_file(path: Path) -> str:
    try:
        names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    near = nearest(path.name, names)
    return f"; did you mean {path.parent / near}?" if near else ""
