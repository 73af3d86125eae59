"""Writes bench/results/adaptive_concurrency.json into docs/scheduling.md: python bench/adaptive_page.py."""

import json
import statistics
from pathlib import Path

from launch.dev.doc_markers import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULT = ROOT / "docs" / "scheduling.md", ROOT / "bench" / "results" / "adaptive_concurrency.json"
BEGIN, END = "<!-- figures: bench/results/adaptive_concurrency.json -->\n", "<!-- end of figures -->"
WORDS = {
    "tail": "heavy-tailed lengths",
    "long": "600 to 1,900 tokens each",
    "short": "100 tokens in the mean",
}


def tokens_per_s(case: dict) -> dict[str, float]:
    """The median over the turns, by arm."""
    turns = list(case.values())
    return {arm: statistics.median(turn[arm]["tokens_per_s"] for turn in turns) for arm in turns[0]}


def over_best(case: dict) -> float:
    """What auto samples, over what the best fixed number of places does."""
    found = tokens_per_s(case)
    return found["auto"] / max(rate for arm, rate in found.items() if arm != "auto")


def figures(result: dict) -> str:
    """The table, one row per workload and cache, and what it ran on."""
    cases = result["cases"]
    arms = list(tokens_per_s(next(iter(cases.values()))))
    head = [
        "answers",
        "KV cache",
        *(f"{arm} places" for arm in arms[:-1]),
        "auto",
        "auto / best fixed",
        "its places",
        "runs",
    ]
    rows = []
    for name, case in sorted(cases.items()):
        kind, _, mib = name.partition("-")
        places = [turn["auto"]["places"].split()[-1] for turn in case.values()]
        rates = [f"{rate:,.0f}" for rate in tokens_per_s(case).values()]
        rows.append([WORDS[kind], f"{mib} MiB", *rates, f"{over_best(case):.2f}", ", ".join(places), str(len(case))])
    machine = result["machine"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    lines += [
        "",
        f"Tokens that the engine sampled per second, from {result['settle_s']:.0f} s after an idle engine got its "
        f"first requests, for {result['counted_s']:.0f} s; every arm asks for the same lengths. "
        "Medians of the runs; one run of an arm is good to about a tenth. "
        f"`python bench/adaptive_concurrency.py` on {machine['cores']} cores ({machine['processor']}).",
    ]
    return "\n".join(lines) + "\n"


def written(page: str, result: dict) -> str:
    """The page with the figures of `result`."""
    return replaced(page, BEGIN, END, figures(result))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULT.read_text())))
