"""Writes every figure of README.md and docs/ from bench/results/*.json: python -m bench.pages [--check].

A page marks the place with `<!-- figures: NAME -->` and `<!-- end of figures -->`; BLOCKS has one function a name. With
--check nothing is written, and the exit code is 1 when a page differs from the results. A test does the same.
"""

import functools
import re
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from bench.figures import (
    COLUMNS,
    ROOT,
    Row,
    filled,
    flat,
    machine_of,
    measurements,
    provenance,
    result,
    span,
    table,
    values,
)

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
MARKS = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
LENGTHS = {"tail": "heavy-tailed lengths", "long": "600 to 1,900 tokens", "short": "100 tokens on average"}
SECTIONS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("sections.yaml").read_text())
TABLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text())


def from_tables(name: str) -> str:
    """A table of tables.yaml, below its source and its text."""
    spec = TABLES[name]
    found = result(spec["result"])
    source = spec.get("source", "../bench/results")
    above = [provenance(spec["result"], source)] if source else []
    above = ["\n".join([*above, filled(spec["text"], flat(found))])] if "text" in spec else above
    if "facts" in spec:
        rows = [[fact, filled(cell, flat(found))] for fact, cell in spec["facts"].items()]
        return "\n\n".join([*above, table(["figure", "value"], rows)])
    measured = chosen(measurements(found, spec["rows"]), spec.get("where", {}))
    columns = spec.get("columns") or {name: f"{{{name}}}" for name in found[spec["rows"]][0]}
    rows = [[filled(cell, row) for cell in columns.values()] for row in measured]
    return "\n\n".join([*above, table(list(columns), rows)])


def chosen(rows: list[dict[str, Any]], where: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that have these values; a list has several."""
    return [row for row in rows if all(row[k] in v if isinstance(v, list) else row[k] == v for k, v in where.items())]


def adaptive_rates(case: dict[str, Any]) -> dict[str, float]:
    """Median tokens per second over the rounds, by arm."""
    turns = list(case.values())
    return {arm: statistics.median(turn[arm]["tokens_per_s"] for turn in turns) for arm in turns[0]}


def over_best(case: dict[str, Any]) -> float:
    """Tokens per second of `auto` over those of the best fixed number."""
    found = adaptive_rates(case)
    return found.pop("auto") / max(found.values())


def adaptive_concurrency() -> list[Row]:
    what = "`rollout.concurrency: auto` over the best fixed number, workload"
    cases = sorted(result("adaptive_concurrency")["cases"].items())
    return [Row(f"{what} `{name}`", [over_best({turn: arms}) for turn, arms in case.items()]) for name, case in cases]


def section_rows(name: str) -> list[Row]:
    """All rows of the section with this result."""
    section = next(section for section in SECTIONS if section["result"] == name)
    if "figures" not in section:
        return adaptive_concurrency()
    return [row for figure in section["figures"] for row in rows_of(result(name), **figure)]


def rows_of(
    found: dict[str, Any], what: str, value: str, of: str | None = None, where: dict[str, Any] | None = None,
    each: bool = False, **looks: Any,
) -> list[Row]:  # fmt: skip
    measured = measurements(found, of) if of else [flat(found)]
    fields = chosen(measured, where or {})
    shown = [[one] for one in fields] if each else [fields]
    return [Row(filled(what, some[0]), [x for one in some for x in values(value, one)], **looks) for some in shown]


def first_row(name: str, *words: str) -> Row:
    """The row of a section whose name has all of `words`."""
    return next(row for row in section_rows(name) if all(word in row.what for word in words))


def readme_start() -> str:
    """The cost of the first command."""
    installed, runs = result("installation")["runs"][-1], result("quickstart")["runs"]
    gib = {name: installed[f"{name}_mib"] / 1024 for name in ("download", "disk")}
    minutes = max(run["seconds_after_installation"] for run in runs) / 60
    accuracy = min(run["greedy_accuracy"] for run in runs)
    text = f"""The first command downloads {gib["download"]:.1f} GiB, needs {gib["disk"]:.1f} GiB of disk, and takes
{installed["install_s"]:.0f} s to install ([measured](bench/results/installation.json)). All further steps take
{minutes:.1f} minutes. At the end the model solves at least {100 * accuracy:.1f} % of held-out problems."""
    return textwrap.fill(text, 100, break_on_hyphens=False)


def readme_reasons() -> str:
    """Three reasons, each with a figure that says who wins and by how much."""
    tail, short = (first_row("trl_comparison", "samples", name) for name in ("long tails", "short answers"))
    half = first_row("async_gain", "same steps")
    killed = first_row("guarantees", "broker_killed")
    faults = len(result("guarantees")["scenarios"])
    return f"""- **Long answers train faster.** With long-tailed answers Slipstream trains {tail.value} times as many
  samples per second as TRL 1.16's fastest way, which is asynchronous too. With short answers it is
  {short.value} times: about equal.
- **Generation and training overlap, within a bound.** With `staleness.max: 2` the quickstart needs
  {half.range} of the synchronous time. The loss [corrects](docs/choosing.md) for the age.
- **Every group is in exactly one committed step.** Real processes are killed, stopped and cut off
  in [{faults} faults](docs/guarantees.md). After a killed broker three new steps take {killed.value}."""


def machine() -> str:
    names = ("trl_comparison", "async_gain", "quickstart")
    machines = sorted({machine_of(result(name)) for name in names})
    commits = sorted({result(name).get("commit", "not recorded") for name in names})
    text = f"Measured on {', '.join(machines)}; commits {', '.join(commits)}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


def adaptive() -> str:
    cases, rows = result("adaptive_concurrency")["cases"], []
    arms = list(adaptive_rates(next(iter(cases.values()))))
    for name, case in sorted(cases.items()):
        kind, _, mib = name.partition("-")
        rates = [f"{rate:,.0f}" for rate in adaptive_rates(case).values()]
        last = [int(turn["auto"]["places"].split()[-1]) for turn in case.values()]
        rows.append([LENGTHS[kind], mib, *rates, f"{over_best(case):.2f}", span(last, "d"), len(case)])
    head = ["answers", "KV cache MiB", *(f"{arm} episodes" for arm in arms[:-1]), "auto", "auto / best fixed"]
    return f"{provenance('adaptive_concurrency')}\n\n{table([*head, 'auto chose', 'rounds'], rows)}"


def faults() -> str:
    """Every fault with its texts from tests/faults and its figures."""
    from tests.faults.scenario import load_all

    figures = result("guarantees")["scenarios"]
    rows = []
    for name, s in load_all().items():
        known = figures.get(name)
        measured = [f"{known['median_s']:.2f} s", f"{known['worst_s']:.2f} s"] if known else ["not measured"] * 2
        rows.append([s.fault, s.happens, s.promise, s.recovered, f"{s.bound}: {s.bound_s:g} s here", *measured])
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    head = ["fault", "what happens", "promise", "the clock stops at", "bound", "median", "worst"]
    return f"{provenance('guarantees')}\n\n{table(head, cells)}"


def all_sections() -> str:
    """Every section: its source and its text, then one row a figure."""
    parts = []
    for section in SECTIONS:
        cells = [row.cells for row in section_rows(section["result"])]
        told = textwrap.fill(section.get("text", ""), 100, break_on_hyphens=False)
        blocks = [f"## {section['title']}", provenance(section["result"]), told, table(COLUMNS, cells)]
        parts.append("\n\n".join(filter(None, blocks)))
    return "\n\n".join(parts)


FUNCTIONS = (readme_start, readme_reasons, machine, adaptive, faults)
BLOCKS: dict[str, Callable[[], str]] = {  # by the name of the mark
    **{function.__name__.replace("_", "-"): function for function in FUNCTIONS},
    "benchmarks": all_sections,
    **{name: functools.partial(from_tables, name) for name in TABLES},
}


def written(page: str) -> str:
    """The page with every marked block as the results have it; raises KeyError for a name without a function."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{BLOCKS[mark[2]]()}\n\n{mark[3]}", page)


def differing() -> list[Path]:
    """Pages that differ from the results."""
    return [page for page in PAGES if written(page.read_text()) != page.read_text()]


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    for page in (pages := differing()):
        print(f"{page.relative_to(ROOT)} {'differs from the results' if check else 'is written'}")
        if not check:
            page.write_text(written(page.read_text()))
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
