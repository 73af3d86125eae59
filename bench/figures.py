"""Reads bench/results/*.json and writes figures as text: tables, ranges, and where a figure comes from."""

import json
import re
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
WORDS = {  # for keys of results
    "1k": "8 x 1,280 tokens",
    "8k": "8 x 8,448 tokens",
    "1k_everysec": "8 x 1,280 tokens, `appendfsync everysec`",
    "1k_always": "8 x 1,280 tokens, `appendfsync always`",
    "8k_everysec": "8 x 8,448 tokens, `appendfsync everysec`",
    "8k_always": "8 x 8,448 tokens, `appendfsync always`",
    "raw_zeromq": "raw ZeroMQ PUSH/PULL (the floor)",
    "relayed_zeromq": "the same through ZeroMQ's own proxy",
    "slipstream_memory": "Slipstream, `durability: memory`",
    "slipstream_everysec": "Slipstream, `durability: everysec`",
    "slipstream_fsync": "Slipstream, `durability: fsync`",
    "redis_pickled_lists": "Redis stream of pickled lists (as PipelineRL does)",
    "msgspec_lists_zeromq": "msgspec lists over ZeroMQ (as prime-rl does)",
}
FIELD = re.compile(r"\{([^:}]+):?([^}]*)\}")


def result(name: str) -> Any:
    """The committed figures of one script."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def filled(text: str, fields: dict[str, Any]) -> str:
    """`text` with every `{value:format}` in place, several with commas; '-' for a value that was not measured."""

    def shown(found: re.Match[str]) -> str:
        return ", ".join("-" if x is None else format(x, found[2]) for x in values(found[1], fields))

    return FIELD.sub(shown, text)


def values(text: str, fields: dict[str, Any]) -> list[Any]:
    """A value of tables.yaml or sections.yaml; a list or dict has several; None for what cannot be divided."""
    above, _, below = text.partition(" / ")
    if below:
        pairs = zip(values(above, fields), values(below, fields), strict=True)
        return [a / b if b else None for a, b in pairs]
    factor, star, name = text.rpartition("*")
    if name not in fields:
        return [float(name)]
    found = fields[name]
    several = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else [found]
    return [x * float(factor) if star and x is not None else x for x in several]


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with the fields of a field beside it, as `a.b`; a column of a list of rows is a list."""
    out = dict(fields)
    for name, found in fields.items():
        inner = flat(found) if isinstance(found, dict) else {}
        if isinstance(found, list) and found and isinstance(found[0], dict):
            inner = {column: [row.get(column) for row in found] for column in found[0]}
        out |= {f"{name}.{field}": value for field, value in inner.items()}
    return out


def measurements(found: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The flat rows of a list, or of a dict, whose keys become the field with its name.

    `a.b` are those of every `b` in `a`, with the fields beside `b`; `each` stands for a dict's dicts. Rows with an
    error have no measurement.
    """
    name, _, inner = path.partition(".")
    rows = {key: row for key, row in found.items() if isinstance(row, dict)} if name == "each" else found[name]
    if isinstance(rows, dict):
        rows = [{name: WORDS.get(key, key)} | row for key, row in rows.items()]
    rows = [flat(row) for row in rows if not {"error", "does_not_fit"} & set(row)]
    return [one | row for one in rows for row in measurements(one, inner)] if inner else rows


def span(values: Sequence[float], form: str) -> str:
    """'3 to 5', or one figure where rounding leaves one."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """One ratio a round."""
    return [a / b for a, b in zip(above, below, strict=True)]


@dataclass(frozen=True)
class Row:
    """One figure of docs/benchmarks.md: its value in every round, and the aim if there is one."""

    what: str
    values: Sequence[float]
    form: str = ".2f"
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def value(self) -> str:
        """The median over the rounds, with its unit."""
        return f"{statistics.median(self.values):{self.form}} {self.unit}".strip()

    @property
    def range(self) -> str:
        return span(self.values, self.form) if len(self.values) > 1 else "one value"

    @property
    def aim(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else "none"

    @property
    def verdict(self) -> str:
        """Whether the median reaches the aim."""
        if self.aim == "none":
            return ""
        median = statistics.median(self.values)
        met = median <= self.at_most if self.at_most is not None else median >= (self.at_least or 0.0)
        return "met" if met else "missed"

    @property
    def cells(self) -> list[str]:
        return [self.what, self.value, self.range, self.aim, self.verdict]


COLUMNS = ["figure", "median", "range over rounds", "aim", "reached"]


def machine_of(found: dict[str, Any]) -> str:
    """'2 cores of AMD EPYC', and the GPU; a few results are counted, not timed, and have no machine."""
    machine = found.get("machine")
    if not machine:
        return "machine not recorded"
    gpu = machine.get("accelerator", "none").partition(",")[0]  # its name
    return f"{machine['cores']} cores of {machine['processor']}{'' if gpu == 'none' else f', {gpu}'}"


def provenance(name: str, folder: str = "../bench/results") -> str:
    """Machine, commit, arguments and rounds, as far as the result has them."""
    found = result(name)
    commit = found.get("commit", "not recorded")
    parts = [machine_of(found), f"commit {commit}", _arguments(found.get("arguments"))]
    parts += [f"{found['rounds']} round{'s' * (found['rounds'] > 1)}"] if isinstance(found.get("rounds"), int) else []
    parts += [f"load {found['load_1min']} at the end"] if "load_1min" in found else []
    text = f"Source: [{name}.json]({folder}/{name}.json); {'; '.join(parts)}."
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _arguments(found: dict[str, Any] | None) -> str:
    if found is None:
        return "arguments not recorded"
    words = [f"{name}={_word(value)}" for name, value in found.items() if name != "output"]
    return f"arguments `{' '.join(words)}`" if words else "no arguments"


def _word(value: object) -> str:
    return (",".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"
