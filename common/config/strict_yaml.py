"""Safe YAML, a little stricter than PyYAML's: no duplicate keys, keys are text, and 3e-4 is a number."""

import re
from typing import Any, cast

import yaml

from common.errors import ConfigError

Document = dict[str, Any]  # parsed YAML that no schema has typed yet


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


_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))  # pyright: ignore[reportUnknownMemberType]


def load(text: str) -> object:
    """Any YAML value; raises yaml.YAMLError on malformed text, duplicate keys, and values that there are not."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # 2026-13-45 is no date, thousands of digits no number
        raise yaml.YAMLError(f"a value that cannot be read: {error}") from None


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
        name, _, indices = word.removesuffix("]").partition("[")
        out += [name, *map(int, indices.split("][") if indices else ())]
    return out


def parse_mapping(text: str, file: str) -> Document:
    """A YAML mapping; raises ConfigError naming `file` and the line on malformed YAML or another kind of value."""
    try:
        loaded = load(text)
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
