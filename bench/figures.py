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
FIELD = re.compile(r"\{([^:}]+):?([^}]*)\}")


def result(name: str) -> Any:
    """The committed figures of one script."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def filled(text: str, fields: dict[str, Any]) -> str:
    """`text` with every `{value:format}` in place; '-' for a value that was not measured."""

    def shown(found: re.Match[str]) -> str:
        (value,) = values(found[1], fields)
        return "-" if value is None else format(value, found[2])

    return FIELD.sub(shown, text)


def values(text: str, fields: dict[str, Any]) -> list[Any]:
    """A value of tables.yaml or sections.yaml; a field with a list has several; None for what cannot be divided."""
    above, _, below = text.partition(" / ")
    if below:
        pairs = zip(values(above, fields), values(below, fields), strict=True)
        return [a / b if b else None for a, b in pairs]
    factor, star, name = text.rpartition("*")
    if name not in fields:
        return [float(name)]
    several = fields[name] if isinstance(fields[name], list) else [fields[name]]
    return [x * float(factor) if star and x is not None else x for x in several]


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with the fields of a field beside it, as `a.b`."""
    inner = {f"{a}.{b}": value for a, found in fields.items() if isinstance(found, dict) for b, value in found.items()}
    return fields | inner


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
    """'2 cores of AMD EPYC'; a few results are counted, not timed, and have no machine."""
    machine = found.get("machine")
    return f"{machine['cores']} cores of {machine['processor']}" if machine else "machine not recorded"


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
    return f"arguments `{' '.join(f'{k}={_word(v)}' for k, v in found.items())}`" if found else "no arguments"


def _word(value: object) -> str:
    return (",".join(map(str, value)) if isinstance(value, list) else str(value)) or "none"
