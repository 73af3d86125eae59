"""Writes the tables of docs/config.md and docs/metrics.md: python -m tests.docs_reference.

They follow from the declarations in common/; the text around them is written by hand.
A key's meaning is the comment behind its field in common/config/, or in the lines above it; a metric says
its own.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from common.config import critic, lora, loss_keys, observing, optimizer, schema, scorers, tasks
from common.config.loading import describe_type, section_in
from common.metrics import EvaluationMetrics, SftMetrics, StepMetrics, declarations

DOCS = Path(__file__).resolve().parents[1] / "docs"
SOURCES = tuple(module.__name__ for module in (schema, critic, lora, loss_keys, observing, optimizer, tasks, scorers))


def comments(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field name to the comment behind it, or to the comment lines above it."""
    out: dict[str, str] = {}
    above: list[str] = []
    declared = [part for part in reversed(kind.__mro__) if part.__module__ in SOURCES]
    for line in "".join(map(inspect.getsource, declared)).splitlines():
        if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            out[field[1]] = field[2] or " ".join(above)
        above = [*above, line.strip("# ")] if line.startswith("    # ") else []
    return out


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[misc]
    if value in (None, ""):
        return "unset"
    return f"`{msgspec.json.encode(value).decode()}`".replace('"', "")


def config_rows(kind: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    said = comments(kind)
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        section = section_in(field.type)
        if section is not None and not field.required and field.default is None:
            yield f"| `{name}` | a section | unset | {_cell(said[field.name])} |"
        if section is not None:
            yield from config_rows(section, f"{name}.")
        else:
            values = describe_type(field.type).removesuffix(" or null")
            yield f"| `{name}` | {values} | {default_of(field)} | {_cell(said[field.name])} |"


def filled(page: Path, head: str, rows: Mapping[str, Iterable[str]]) -> str:
    """The text of a page with a table of these rows under each heading; raises ValueError for a missing heading."""
    text = page.read_text()
    for heading, lines in rows.items():
        table = "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines, ""])
        place = rf"(?m)(^## {re.escape(heading)}\n(?:(?!## |\|).*\n)*)(?:\|.*\n)+"
        text, found = re.subn(place, lambda old, table=table: old[1] + table, text)
        if not found:
            raise ValueError(f"{page} has no heading {heading!r} with a table below it")
    return text


def config_page() -> str:
    sections = {
        field.name: config_rows(field.type, f"{field.name}.")
        for field in msgspec.structs.fields(schema.Config)
        if field.name not in ("watch", "scorers")
    }
    listed = [config_rows(tasks.RewardConfig, "tasks.reward[]."), config_rows(tasks.MessageConfig, "tasks.prompt[].")]
    shared = [f"`tasks.sources.NAME.{name}`" for name in (*tasks.EpisodesConfig.__struct_fields__, "limits")]
    of_sources = config_rows(tasks.SourceConfig, "tasks.sources.NAME.")
    own_of_sources = (row for row in of_sources if not any(row.startswith(f"| {name[:-1]}") for name in shared))
    sections["tasks"] = chain(sections["tasks"], *listed, own_of_sources)
    sections["watch"] = config_rows(schema.WatchRule, "watch[].")  # a list of them
    sections["scorers"] = config_rows(scorers.ScorerConfig, "scorers.NAME.")  # a mapping
    own = [row for row in config_rows(schema.SftLearnerConfig, "learner.") if "sequences_per_step" in row]
    rows, held_out = (schema.SftTasksConfig, "tasks."), (schema.SftEvaluationConfig, "evaluation.")
    sections["slipstream sft"] = chain(config_rows(*rows), own, config_rows(*held_out))
    return filled(DOCS / "config.md", "key | value | default | means", sections)


def metrics_page() -> str:
    kinds = (StepMetrics, EvaluationMetrics, SftMetrics)
    titles = ("A step of reinforcement learning", "A version on held-out problems", "A step of a warm start")
    rows = {
        title: [f"| `{d.name}` | {d.unit} | {d.reduction} | {_cell(d.description)} |" for d in declarations(kind)]
        for title, kind in zip(titles, kinds, strict=True)
    }
    return filled(DOCS / "metrics.md", "metric | unit | over steps | means", rows)


def _cell(text: str) -> str:
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text.replace("|", "\\|"))


if __name__ == "__main__":
    (DOCS / "config.md").write_text(config_page())
    (DOCS / "metrics.md").write_text(metrics_page())
