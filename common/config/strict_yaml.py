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
    """The line, from 1, of a dotted key path in YAML that parses; of the nearest section above it when it is absent."""
    node: Any = cast("Any", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
    line: int | None = None
    for part in key.split("."):
        pairs: list[tuple[Any, Any]] = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name, value) for name, value in pairs if name.value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line


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
