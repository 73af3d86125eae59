"""Writes the figures of bench/results/guessing.json into docs/environments.md: python bench/guessing_page.py."""

import json
from pathlib import Path

from launch.dev.doc_markers import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULT = ROOT / "docs" / "environments.md", ROOT / "bench" / "results" / "guessing.json"
BEGIN, END = "<!-- figures: bench/results/guessing.json -->\n", "<!-- end of figures -->"


def figures(result: dict) -> str:
    """The table, one row per seed, and what it ran on."""
    lines = [
        "| seed | success, first 5 steps | last 10 of all | steps to 0.85 | greedy, sampled at the end | training | "
        "episodes | of several versions | turns |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        several = f"{run['episodes_of_several_versions']:,}, in {run['steps_with_such_episodes']} steps"
        lines.append(
            f"| {run['seed']} | {run['success_first_5']:.2f} | {run['success_last_10']:.2f} of {run['steps']} | "
            f"{run['steps_to_0.85']} | {run['greedy_accuracy']:.2f}, {run['sampled_accuracy']:.2f} | "
            f"{run['training_s']:.0f} s | {run['episodes']:,} | {several} | "
            f"{run['turns_mean']:.1f} |"
        )
    machine = result["machine"]
    lines += [
        "",
        f"`python bench/guessing.py` on {machine['cores']} cores ({machine['processor']}), shared with others.",
    ]
    return "\n".join(lines) + "\n"


def written(page: str, result: dict) -> str:
    """The page with the figures of `result`."""
    return replaced(page, BEGIN, END, figures(result))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULT.read_text())))
