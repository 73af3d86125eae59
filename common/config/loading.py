"""Load a YAML config strictly: an error names the file, the line, the key path and the nearest valid name.

The YAML is safe and a little stricter than PyYAML's: no duplicate keys, keys are text, and 3e-4 is a number. 010 and
1:30 are texts, where YAML 1.1 reads 8 and 90.

msgspec checks the document against the schema. Its errors are rewritten here, with what the key accepts and what was
found. `key.path=value` overrides are typed as YAML, applied before the check and named as '<override>'. A text without
quotes is taken whole there.
"""

import operator
import re
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec
import yaml
from msgspec import inspect as schema_info

from common.config.observing import WatchRule
from common.config.precision import refused_type
from common.config.schema import BaseConfig, Config, SftConfig
from common.config.scorers import scorer_problems, teacher_problems
from common.config.tasks import task_problems
from common.config.types import MOST_FLOAT, MOST_INTEGER, names_in
from common.errors import ConfigError, Problem, UsageError, meant, nearest
from common.metrics import StepMetrics, numbers

Document = dict[str, Any]  # parsed YAML that no schema has typed yet
OVERRIDE = "<override>"
MOST_BITS_SHOWN = 256
REPLACED = {
    "broker.backend": "broker.store: file or redis takes its place, with broker.redis for it; docs/redis.md",
    "tasks.eval_dataset": "evaluation.datasets: [PATH] takes its place; docs/evaluation.md",
    "rollout.engine.data_parallel": "use rollout.nodes instead: a node is an engine; docs/layouts.md",
}
CONDITIONS = ("below", "above", "drops", "spikes")  # a watch rule has one of them
OTHERS = re.compile(r"(environment|sources)/.+|evaluation/[^/]+/\w+")  # metrics whose names only the run knows
S = TypeVar("S", bound=BaseConfig)

# how msgspec names the place of an error, and the field that is unknown or missing there
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"Object (?:contains (unknown)|missing required) field `(.*?)`")


def load_config(path: Path, overrides: Sequence[str] = (), schema: type[S] = Config) -> S:
    """Read one YAML file, override and check it. Checks that need more than one key are in common/config/checks.py.

    Args:
        overrides: `key.path=value` words; values are typed as YAML, later ones win.
        schema: Config (an RL job) or SftConfig (a supervised warm start).

    Raises:
        UsageError: the file cannot be read or an override is not `key=value`.
        ConfigError: names file and line (or '<override>'), key path, what was expected and found, the nearest key.
    """
    text = _read(path)
    return _built(text, parse_mapping(text, str(path)), path, overrides, schema)


def load_either(path: Path, overrides: Sequence[str] = ()) -> BaseConfig:
    """Load an RL or a warm-start config, whichever `path` contains. Raises as `load_config`."""
    text = _read(path)
    document = parse_mapping(text, str(path))
    return _built(text, document, path, overrides, kind_of(document))


def _built(text: str, document: Document, path: Path, overrides: Sequence[str], schema: type[S]) -> S:
    """The config of a parsed file; an error in the file names its line."""
    try:
        return build_config(document, str(path), overrides, schema)
    except ConfigError as error:
        if error.file == OVERRIDE:
            raise
        line = line_of(text, error.key)
        raise ConfigError(error.file, error.key, error.expected, error.found, error.hint, line) from None


def kind_of(document: Document) -> type[BaseConfig]:
    return SftConfig if _looks_like_sft(document) else Config


def build_config(document: Document, file: str, overrides: Sequence[str] = (), schema: type[S] = Config) -> S:
    """A config from what YAML or JSON gave; `file` is named in errors. Arguments and raises as `load_config`."""
    if schema is Config and _looks_like_sft(document):
        lacks = "tasks has neither environment nor reward, and there is no rollout"
        raise UsageError(f"{file} is a config of `slipstream sft`: {lacks}")
    if schema is SftConfig and "rollout" in document:
        raise UsageError(f"{file} is a config of `slipstream up`: a warm start has no rollout")
    overridden = {_apply_override(document, word, schema) for word in overrides}
    try:
        config = msgspec.convert(document, schema)
    except msgspec.ValidationError as error:
        raise _rewritten(str(error), document, file, overridden, schema) from None
    for number, rule in enumerate(config.rl.watch if config.rl else []):
        for problem in rule_problems(f"watch[{number}]", rule):
            raise ConfigError.of(OVERRIDE if "watch" in overridden else file, problem)
    for problem in _reward_problems(config.rl) if config.rl else ():
        raise ConfigError.of(OVERRIDE if problem.key in overridden else file, problem)
    return config


def _reward_problems(config: Config) -> Iterator[Problem]:
    yield from task_problems(config.tasks)
    rollout = config.rollout
    yield from scorer_problems(
        config.scorers, config.tasks, sample_s=rollout.sample_timeout_s, group_size=rollout.group_size
    )
    yield from teacher_problems(config.scorers, config.learner.loss.distillation)


def rule_problems(at: str, rule: WatchRule) -> Iterator[Problem]:
    """Why a watch rule, at the key path `at`, makes no sense."""
    known = numbers(StepMetrics)
    if rule.metric not in known and not OTHERS.fullmatch(rule.metric):
        hint = meant(rule.metric, known, "docs/metrics.md lists them")
        yield Problem(f"{at}.metric", "a metric that is one number", describe_value(rule.metric), hint)
    found = [name for name in CONDITIONS if getattr(rule, name) is not None]
    if len(found) != 1:
        yield Problem(at, f"exactly one of {', '.join(CONDITIONS)}", " and ".join(found) or "none of them")
    if rule.do == "run" and not rule.command:
        yield Problem(f"{at}.command", "the words of a command, for do: run", "nothing")
    if rule.do != "run" and rule.command:
        yield Problem(f"{at}.do", "run, for a rule with a command", describe_value(rule.do))


def dump_yaml(config: msgspec.Struct) -> str:
    """The complete resolved config, every default written out; `load_config` reads it back equal."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True)


def key_paths(schema: type[msgspec.Struct], at: str = "") -> list[str]:
    """Every dotted key path of a schema, sections included, in the order of the schema."""
    out: list[str] = []
    for field in msgspec.structs.fields(schema):
        path = _join(at, field.name)
        out.append(path)
        if (section := section_in(field.type)) is not None:
            out.extend(key_paths(section, path))
    return out


def describe_value(value: object) -> str:
    """A value of a document in words, for example "'many' (text)"."""
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.name, [file.name for file in path.parent.glob("*.y*ml")])
        hint = f"; did you mean {path.parent / near}?" if near else ""
        raise UsageError(f"config file {path} does not exist{hint}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; expected a config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"config file {path} cannot be read: {error}") from None


def _looks_like_sft(document: Document) -> bool:
    tasks: object = document.get("tasks")
    has_environment = isinstance(tasks, dict) and not tasks.keys().isdisjoint(("environment", "reward", "sources"))
    learner: object = document.get("learner")
    has_sequences = isinstance(learner, dict) and "sequences_per_step" in learner
    return "rollout" not in document and not has_environment and (has_sequences or "tasks" in document)


def _apply_override(document: Document, word: str, schema: type[msgspec.Struct]) -> str:
    """Write one `key.path=value` into `document`; returns the key path."""
    key, equals, text = word.partition("=")
    if not equals or "[" in key or any(not part for part in key.split(".")):
        raise UsageError(f"override {word!r}: expected key.path=value, for example run.steps=40")
    kind = _type_of(key, schema)
    try:
        value = load_yaml(text)
        whole = _is_text(text, value, kind)
    except yaml.YAMLError:
        raise ConfigError(OVERRIDE, key, "a YAML value", repr(text), "put quotes around the value") from None
    if whole:
        value = text
    *sections, name = key.split(".")
    target = document
    for section in sections:
        below = target.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(OVERRIDE, key, f"a section at '{section}'", describe_value(below))
        below = dict(cast("Document", below))  # with a YAML alias, other keys have the same section
        target[section] = below
        target = below
    target[name] = value
    return key


def _type_of(key: str, schema: type[msgspec.Struct]) -> Any:
    """The schema's type at the dotted path of an override; raises ConfigError naming the nearest key."""
    kind: Any = schema
    done: list[str] = []
    for part in parts_of(key):
        if isinstance(part, int):
            kind = next(get_args(one)[0] for one in (kind, *get_args(kind)) if get_origin(one) is list)
            done[-1] += f"[{part}]"
            continue
        if (section := section_in(kind)) is not None:
            fields = {field.name: field.type for field in msgspec.structs.fields(section)}
            if part not in fields:
                raise _unknown_key(OVERRIDE, ".".join(done), part, section, schema)
            kind = fields[part]
        elif (mapping := _mapping_in(kind)) is not None:
            kind = get_args(mapping)[1]
        else:
            expected = f"'{'.'.join(done)}' to be {describe_type(kind)}"
            raise ConfigError(OVERRIDE, key, expected, f"the key '{part}' below it")
        done.append(part)
    return kind


def _rewritten(
    text: str, document: Document, file: str, overridden: set[str], schema: type[msgspec.Struct]
) -> ConfigError:
    """msgspec's error, with the key's whole path, what it accepts, what was found there, and the nearest name."""
    place = _PLACE.search(text)
    field = _FIELD.match(text)
    key = place[1] if place else ""
    while "[...]" in key:  # msgspec does not name the entry of a mapping
        mapping, _, below = key.partition("[...]")
        entry_type = get_args(_mapping_in(_type_of(mapping, schema)))[1]
        entries = cast("Document", _value_at(document, mapping))
        name, why = next((name, why) for name, entry in entries.items() if (why := _refused(entry, entry_type)))
        if set(name) & set(".[]"):  # no key path can lead into it
            source, expected = _source(mapping, file, overridden), f"a mapping to {describe_type(entry_type)}"
            return ConfigError(source, mapping, expected, f"{name!r}, whose value: {why}")
        key = _join(mapping, name) + below
    section = section_in(_type_of(key, schema))
    at = key
    key = _join(key, field[2]) if field else key
    source = _source(key, file, overridden)
    if field and field[1]:
        return _unknown_key(source, at, field[2], section, schema)
    kind = _type_of(key, schema)
    if field:
        return ConfigError(file, key, describe_type(kind), "nothing", "this key is required")
    value = _value_at(document, key)
    hint = None
    info = schema_info.type_info(kind)
    if isinstance(value, str) and (near := nearest(value, _names(info))):
        hint = f"did you mean '{near}'?"
    if key == "model.dtype" and (why := refused_type(str(value))):
        hint = why
    if isinstance(value, int) and abs(value) > MOST_INTEGER:
        hint = f"at most {MOST_INTEGER}"
    if _looks_like_text(value, info):
        hint = "put quotes around a text that begins with {"
    return ConfigError(source, key, describe_type(kind), describe_value(value), hint)


def _source(key: str, file: str, overridden: set[str]) -> str:
    """The file, or OVERRIDE for a value that an override gave."""
    return OVERRIDE if any(key == o or key.startswith((f"{o}.", f"{o}[")) for o in overridden) else file


def _unknown_key(file: str, at: str, name: str, section: Any, schema: type[msgspec.Struct]) -> ConfigError:
    key = _join(at, name) or repr(name)
    known = [field.name for field in msgspec.structs.fields(section)]
    elsewhere = [path for path in key_paths(schema) if path.rpartition(".")[2] == name]
    if key in REPLACED:
        return ConfigError(file, key, "a known key", f"unknown key '{name}'", REPLACED[key])
    near = elsewhere[0] if elsewhere else nearest(name, known)
    hint = f"did you mean '{near}'?" if near else f"known keys here: {', '.join(known)}"
    return ConfigError(file, key, "a known key", f"unknown key '{name}'", hint)


def _value_at(document: Document, key: str) -> object:
    return reduce(operator.getitem, parts_of(key), cast("Any", document))


def _refused(value: object, kind: Any) -> str:
    """msgspec's reason why a value is not of the type; '' when it is."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _names(kind: schema_info.Type) -> list[str]:
    """The names that a type accepts, without those of import paths."""
    if isinstance(kind, schema_info.UnionType):
        return [name for each in kind.types for name in _names(each)]
    if isinstance(kind, schema_info.LiteralType):
        return [str(value) for value in kind.values]
    return names_in(kind.pattern) if isinstance(kind, schema_info.StrType) else []


def _is_text(text: str, value: object, kind: Any) -> bool:
    """Whether `text`, a value of the command line that YAML reads as `value`, stands for itself under the type.

    It does without quotes, where the type has a text: run.name=2026, tasks.prompt={question}, 'run.dir=/data/run #3'.
    """
    info = schema_info.type_info(kind)
    kinds = info.types if isinstance(info, schema_info.UnionType) else (info,)
    if not any(isinstance(each, schema_info.StrType | schema_info.AnyType) for each in kinds):
        return False
    if isinstance(value, str):
        node: Any = cast("Any", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
        return node.style is None and text.lstrip()[0] not in "!&"
    if value is None and text.lstrip().startswith("#"):
        return True
    only = isinstance(info, schema_info.StrType)
    return only or _looks_like_text(value, info) or (not isinstance(value, dict | list) and bool(_refused(value, kind)))


def _looks_like_text(value: object, kind: schema_info.Type) -> bool:
    """Whether YAML reads a mapping, as of an unquoted {question}, where the schema has a text but no mapping."""
    kinds = kind.types if isinstance(kind, schema_info.UnionType) else (kind,)
    has_mapping = any(isinstance(each, schema_info.DictType) for each in kinds)
    return isinstance(value, dict) and not has_mapping and any(isinstance(k, schema_info.StrType) for k in kinds)


def _mapping_in(kind: Any) -> Any:
    """The mapping that a type is, or that is one of its choices; None without one."""
    return next((one for one in (kind, *get_args(kind)) if get_origin(one) is dict), None)


def section_in(kind: Any) -> type[msgspec.Struct] | None:
    """The section that a type is, or that may be left out; None without one."""
    choices = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    return next((one for one in choices if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)


def describe_type(kind: Any) -> str:
    """A type in words, for example 'an integer >= 1' or 'one of keep, recompute'."""
    if (section := section_in(kind)) is not None:
        return f"a section with the keys {', '.join(field.name for field in msgspec.structs.fields(section))}"
    return _in_words(schema_info.type_info(kind))


def _in_words(kind: schema_info.Type) -> str:
    if isinstance(kind, schema_info.UnionType):
        return " or ".join(_in_words(k) for k in kind.types)
    if isinstance(kind, schema_info.ListType):
        return f"a list of {_in_words(kind.item_type)}"
    if isinstance(kind, schema_info.LiteralType):
        return "one of " + ", ".join(_names(kind))
    if known := _names(kind):
        return f"one of {', '.join(known)}, or 'module:function'"
    if isinstance(kind, schema_info.IntType | schema_info.FloatType):
        word, most = ("an integer", MOST_INTEGER) if isinstance(kind, schema_info.IntType) else ("a number", MOST_FLOAT)
        bounds = [(">=", kind.ge), (">", kind.gt), ("<=", kind.le), ("<", kind.lt)]
        shown = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None and abs(bound) < most]
        return " ".join([word, " and ".join(shown)]).strip()
    names: dict[type[schema_info.Type], str] = {
        schema_info.StrType: "text",
        schema_info.BoolType: "true or false",
        schema_info.NoneType: "null",
        schema_info.DictType: "a mapping",
        schema_info.AnyType: "any value",
        schema_info.StructType: "sections",
    }
    return names.get(type(kind), type(kind).__name__)


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` as text and lets the last of two equal keys win; this one does neither."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Document:
    out: Document = {}
    for key_node, value_node in node.value:
        key: object = loader.construct_object(key_node, deep=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(key, str):
            problem = f"the key {key!r} is not text; put it in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in out:
            problem = f"the key '{key}' stands twice in one section"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        out[key] = loader.construct_object(value_node, deep=True)  # pyright: ignore[reportUnknownMemberType]
    return out


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = loader.construct_scalar(node)
    text.encode()  # "\\ud800" is half of a character: neither a file nor a message can have it
    return text


# YAML 1.1 without integers of base 8 and 60
_INT = re.compile(r"^[-+]?(0b[01_]+|0x[\da-fA-F_]+|0|[1-9][\d_]*)$")
_FLOAT = re.compile(
    r"^([-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d+(?=[eE]))([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:str", _text)
_RESOLVERS: dict[str, re.Pattern[str]] = {"tag:yaml.org,2002:int": _INT, "tag:yaml.org,2002:float": _FLOAT}
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in _RESOLVERS]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _RESOLVERS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, list("-+0123456789."))  # pyright: ignore[reportUnknownMemberType]


def load_yaml(text: str) -> object:
    """Any YAML value; raises yaml.YAMLError on malformed text, duplicate keys, and values that there are not."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # 2026-13-45 is no date, thousands of digits no number
        raise yaml.YAMLError(f"a value that cannot be read: {error}") from None


def values_of(text: str) -> list[str]:
    """The texts of 'a,b,c', which are the entries of a YAML list: commas in quotes and brackets do not separate them.

    Raises yaml.YAMLError.
    """
    node: Any = cast("Any", yaml.compose(f"[{text}]", Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
    if node.end_mark.index != len(text) + 2:
        raise yaml.YAMLError("a bracket or a quote has no counterpart")
    return [text[entry.start_mark.index - 1 : entry.end_mark.index - 1] for entry in node.value]


def line_of(text: str, key: str) -> int | None:
    """The line, from 1, of a key path in YAML that parses; of the nearest section above it when it is absent."""
    node: Any = cast("Any", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
    line: int | None = None
    for part in parts_of(key):
        if isinstance(part, int):
            entries: list[Any] = node.value if isinstance(node, yaml.SequenceNode) else []
            found = [(entry, entry) for entry in entries[part : part + 1]]
        else:
            pairs: list[tuple[Any, Any]] = node.value if isinstance(node, yaml.MappingNode) else []
            found = [pair for pair in pairs if pair[0].value == part]
        if not found:
            break
        line = found[0][0].start_mark.line + 1
        node = found[0][1]
    return line


def parts_of(key: str) -> list[str | int]:
    """'watch[1].metric' as ['watch', 1, 'metric']."""
    out: list[str | int] = []
    for word in key.split(".") if key else ():
        indices = re.search(r"(\[\d+\])*$", word)
        name = word[: indices.start()] if indices else word
        out += [name, *map(int, re.findall(r"\d+", word[len(name) :]))]
    return out


def parse_mapping(text: str, file: str) -> Document:
    """A YAML mapping; raises ConfigError naming `file` and the line on malformed YAML or another kind of value."""
    try:
        loaded = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the document"
        raise ConfigError(file, where, "YAML", error.problem or str(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(file, "the document", "YAML", str(error)) from None
    if not isinstance(loaded, dict):
        found = "nothing" if loaded is None else type(loaded).__name__
        raise ConfigError(file, "the document", "a mapping of sections", found)
    return cast("Document", loaded)
