"""The figures of docs/weights.md, from weight_broadcast, flip_cost and join.json: python bench/weights_page.py."""

import json
from pathlib import Path
from typing import Any

from launch.dev.doc_markers import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "weights.md", ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: bench/weights_page.py writes them -->", "<!-- end of the figures -->"


def render() -> str:
    """The text between the marks."""
    measured: dict[str, Any] = json.loads((RESULTS / "weight_broadcast.json").read_text())
    flips: list[dict[str, Any]] = json.loads((RESULTS / "flip_cost.json").read_text())["runs"]
    rows = [
        "| model | bytes | nodes | ours | one flat broadcast | ours / flat | one per parameter | ours is faster by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| {r['tensors']:,} {r['model'].removeprefix('many ')} | {r['bytes'] / 1e6:.0f} MB | {r['nodes']} | "
        f"{1e3 * r['broadcast_s']:.0f} ms | {1e3 * r['flat_s']:.0f} ms | {r['over_flat']:.2f} | "
        f"{1e3 * r['per_parameter_s']:.0f} ms | {r['times_faster_than_per_parameter']:.1f} times |"
        for r in measured["broadcast"]
    ]
    join, large = measured["join"], measured["broadcast"][0]
    joins = json.loads((RESULTS / "join.json").read_text())
    deaths = {r["signal"]: r for r in measured["death"]}
    shares = [r["learner_copy_share_of_step"] for r in flips]
    kill, stop = deaths["SIGKILL"], deaths["SIGSTOP"]
    points = [
        f"- **Join**, {join['bytes'] / 1e6:.0f} MB: from an engine that is ready to weights in use "
        f"{join['from_learner_s']:.2f} s when the learner serves them, {join['from_peer_s']:.2f} s when a peer does.",
        f"- **Join of a running job** (`bench/join.py`: the quickstart's, whose learner and first node keep both cores "
        f"busy; median of {len(joins['joins'])}, worst in brackets): from an engine that is ready to the first group "
        f"that the broker accepted {spread(joins['engine_to_first_group_s'])} s. Of that, in ms: weights "
        f"staged {spread(joins['staged_s'], '.0f', 1e3)}, in use {spread(joins['active_s'], '.0f', 1e3)}, first lease "
        f"{spread(joins['lease_s'], '.0f', 1e3)}, the group itself {spread(joins['first_group_s'], '.0f', 1e3)}. From "
        f"the start of the process {spread(joins['process_to_first_group_s'], '.0f')} s, of which the start of vLLM "
        f"takes {spread(joins['engine_s'], '.0f')}.",
        f"- **Death in the middle of a broadcast** ({large['bytes'] / 1e6:.0f} MB, `weights.timeout_s: "
        f"{measured['timeout_s']:g}`): every other node runs the version {kill['others_have_it_s']:.1f} s after a "
        f"`kill -9` (at worst {kill['worst_s']:.1f}), and {stop['others_have_it_s']:.1f} s after a `SIGSTOP` (at worst "
        f"{stop['worst_s']:.1f}): a closed connection tells at once, silence only after 3 s.",
        f"- **Learner time lost to publishing**: {1e3 * large['learner_held_s']:.1f} ms for "
        f"{large['bytes'] / 1e6:.0f} MB, where a plain copy takes {1e3 * large['plain_copy_s']:.1f} ms; in whole runs, "
        f"the export of the weights included, {100 * min(shares):.1f} to {100 * max(shares):.1f} % of the step "
        "(`bench/results/flip_cost.json`).",
    ]
    return "\n".join([*rows, "", *points])


def spread(figure: dict[str, float], form: str = ".2f", scale: float = 1.0) -> str:
    """'1.06 (1.36)': median and worst."""
    return f"{scale * figure['median']:{form}} ({scale * figure['worst']:{form}})"


def main() -> None:
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, f"\n\n{render()}\n\n"))


if __name__ == "__main__":
    main()
