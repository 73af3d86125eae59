"""Writes docs/config.md and docs/metrics.md from the declarations in common/: python -m launch.dev.docs_reference.

A key's meaning is the comment behind its field in common/config/schema.py, or in the lines above it; a metric says
its own.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.config import observing, schema
from common.config.loading import describe_type
from common.metrics import EvaluationMetrics, SftMetrics, StepMetrics, declarations

DOCS = Path(__file__).resolve().parents[2] / "docs"
CONFIG_HEAD = """# Config keys

Written by `python -m launch.dev.docs_reference` from `common/config/schema.py`; do not edit.
A config is one YAML file, complete by itself. `section.key=value` behind it overrides single keys.
Unknown keys are refused with the nearest valid name, wrong values with what was expected.
Relative paths begin in the folder in which the command is started. A run keeps its resolved
config in `RUN/config.yaml`.
"""
SFT_HEAD = """
## slipstream sft

A warm start has `run`, `model` and `telemetry` as above; under `learner` it has `world_size`,
`threads`, `timeout_s`, `micro_batch_tokens`, `parallel`, `memory`, `moe`, `optimizer` and
`checkpoint` as above, and these:

"""
SFT_VALIDATION = """
With `evaluation.every` above 0 no step trains the held-out rows. The share has the rows with the
smallest SHA-256 digests, so equal rows are never on both sides. Every so many steps, and at the
end, `validation_loss` in [metrics.md](metrics.md) is their cross-entropy under the current weights.
A log line says how many rows train and how many validate. A run that continues must have the same
section `evaluation`. `learner.checkpoint.keep_best: -validation_loss` keeps the best checkpoint.
"""
METRICS_HEAD = """# Metrics

Written by `python -m launch.dev.docs_reference` from `common/metrics.py`; do not edit.
`RUN/metrics.jsonl` has one JSON line per optimizer step; `slipstream report` draws it. Lines with a
`kind` are about a version, such as those of an [evaluation](evaluation.md).
*Tokens* are sampled tokens unless said otherwise. *Over steps* says how several steps are combined.
[algorithms.md](algorithms.md) names the signs of trouble, [waste.md](waste.md) the
kinds of waste.
"""


def comments(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Field name to the comment behind it, or to the comment lines above it."""
    out: dict[str, str] = {}
    above: list[str] = []
    declared = [part for part in kind.__mro__ if part.__module__ in (schema.__name__, observing.__name__)]
    for line in "".join(map(inspect.getsource, declared)).splitlines():
        if field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            out[field[1]] = field[2] or " ".join(above)
        above = [*above, line.strip("# ")] if line.startswith("    # ") else []
    return out


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "needed"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[misc]
    if value is None:
        return "unset"
    return f"`{msgspec.json.encode(value).decode()}`".replace('"', "")


def config_rows(kind: type[msgspec.Struct], prefix: str, only: frozenset[str] | None = None) -> Iterator[str]:
    said = comments(kind)
    for field in msgspec.structs.fields(kind):
        name = f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            if only is None:
                yield from config_rows(field.type, f"{name}.")
        elif only is None or field.name in only:
            values = describe_type(field.type).removesuffix(" or null")
            yield f"| `{name}` | {values} | {default_of(field)} | {_cell(said[field.name])} |"


def table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows]) + "\n"


def config_page() -> str:
    head = ("key", "value", "default", "means")
    parts = [CONFIG_HEAD]
    for section in msgspec.structs.fields(schema.Config):
        rows = config_rows(
            *([schema.WatchRule, "watch[]."] if section.name == "watch" else [section.type, f"{section.name}."])
        )
        parts.append(f"\n## {section.name}\n\n{table(head, list(rows))}")
    tasks = list(config_rows(schema.SftTasksConfig, "tasks."))
    learner = list(config_rows(schema.SftLearnerConfig, "learner.", frozenset({"sequences_per_step"})))
    held_out = list(config_rows(schema.SftEvaluationConfig, "evaluation."))
    every = schema.SftLearnerConfig().checkpoint
    closing = f"\nIts checkpoints have the defaults `every: {every.every}` and `keep: {every.keep}`.\n"
    return "".join(parts) + SFT_HEAD + table(head, tasks + learner + held_out) + closing + SFT_VALIDATION


def metrics_page() -> str:
    head = ("metric", "unit", "over steps", "means")
    parts = [METRICS_HEAD]
    kinds = (StepMetrics, EvaluationMetrics, SftMetrics)
    titles = ("A step of reinforcement learning", "A version on held-out problems", "A step of a warm start")
    for title, kind in zip(titles, kinds, strict=True):
        rows = [f"| `{d.name}` | {d.unit} | {d.reduction} | {_cell(d.description)} |" for d in declarations(kind)]
        parts.append(f"\n## {title}\n\n{table(head, rows)}")
    return "".join(parts)


def _cell(text: str) -> str:
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text.replace("|", "\\|"))


if __name__ == "__main__":
    (DOCS / "config.md").write_text(config_page())
    (DOCS / "metrics.md").write_text(metrics_page())
