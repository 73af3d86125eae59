"""docs/asynchrony.md from bench/results: `python bench/async_page.py` writes it."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "asynchrony.md"

HEAD = """# What asynchrony gains

Made by `python bench/async_page.py` from the committed results; `bench/async_tail.py` and `bench/simulate.py` made
those.

The simulator (`bench/simulate.py`) plays a job event by event under the product's rules: the window, oldest first,
leases ahead of need, engines that advance all their requests one token a step. It knows an engine by three numbers
(seconds of a step, seconds that each running request adds, seconds of a call) and a learner by two (seconds of a
step, seconds a token).
"""


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def busy_s(figures: dict) -> float:
    return figures["wall_after_first_step_s"] - figures["learner_idle_s"]


def pair_row(staleness: int, pair: dict) -> list[object]:
    sync, asynchronous = pair["measured"]["synchronous"], pair["measured"]["asynchronous"]
    return [
        staleness,
        pair["seed"],
        f"{sync['wall_after_first_step_s']:.1f}",
        f"{asynchronous['wall_after_first_step_s']:.1f}",
        f"{busy_s(asynchronous) / busy_s(sync):.1f}",
        f"{pair['measured_over_simulated']['synchronous']:.2f}",
        f"{pair['measured_over_simulated']['asynchronous']:.2f}",
        f"{pair['gain']:.2f}",
        f"{pair['simulated_gain']:.2f}",
        f"{pair['share_of_simulated_gain']:.2f}",
    ]


def measured() -> str:
    """Real processes against their simulation."""
    found = json.loads((RESULTS / "async_tail.json").read_text())
    wider = json.loads((RESULTS / "async_tail_k8.json").read_text())
    rows = [pair_row(4, pair) for pair in found["pairs"]] + [pair_row(8, pair) for pair in wider["pairs"]]
    lengths = found["pairs"][0]["measured"]["synchronous"]
    machine = found["machine"]
    share = found["share_of_simulated_gain_median"]
    head = ["staleness.max", "seed", "sync s", "async s", "learner busy, async / sync"]
    head += ["sync / simulated", "async / simulated", "gain", "simulated gain", "share"]
    return (
        "## Measured\n\n"
        f"One learner and one node ({machine['processor']}, {machine['cores']} cores, no accelerator), "
        f"{found['steps']} steps of 8 groups of 8 episodes, 4 % of them long: "
        f"{lengths['length_mean']:.0f} tokens in the mean, {lengths['length_max']} at most. Seconds are from the end "
        "of the first step to the end of the last one.\n\n"
        + table(head, rows)
        + f"\nMedian gain with a window of 4: {found['gain_median']:.2f}, {share:.2f} of what the simulation of the "
        f"same lengths says is possible; with a window of 8, one pair: {wider['gain_median']:.2f}, "
        f"{wider['share_of_simulated_gain_median']:.2f}. The simulator gives learner and engine a machine each. Here "
        "they share two cores, and with them the node's front process and the memory: while both work, the learner "
        "takes longer for the same tokens (the fifth column). The two runs of a pair draw other lengths.\n"
    )


def predicted() -> str:
    """Larger fleets."""
    found = json.loads((RESULTS / "simulate.json").read_text())["predictions"]
    rows = [
        [
            p["setup"]["nodes"],
            p["setup"]["staleness"],
            p["setup"]["groups_per_step"],
            p["synchronous_step_s"],
            p["asynchronous_step_s"],
            f"{p['gain']:.2f}",
            p["full_engines_s"],
            f"{p['asynchronous_learner_idle']:.0%}",
        ]
        for p in found
    ]
    mean = found[0]["mean_tokens"]
    head = ["nodes", "staleness.max", "groups a step", "sync step s", "async step s", "gain", "full engines s"]
    return (
        "## Predicted\n\n"
        f"Fleets of up to 1,000 nodes with 64 episodes each, lengths with a Pareto tail ({mean:.0f} tokens in the "
        "mean, 16,384 at most), a step that takes as many groups as the fleet holds at once, and a learner that is "
        "just ahead of it. The engine's and the learner's speeds are assumptions, written into the results.\n\n"
        + table([*head, "learner idle"], rows)
        + "\nSeconds are from step to step in the middle third of a run. `full engines`: what generation of a step "
        "takes on engines that are never less than full. A window of few steps is used up by groups of which one long "
        "sample is left; a wider one keeps the engines full. Steps are counted, not tokens: a group that waited longer "
        "than the window counts as a whole, where a job would leave its oldest tokens out of the loss.\n"
    )


def render() -> str:
    return "\n".join([HEAD, measured(), predicted()])


if __name__ == "__main__":
    PAGE.write_text(render())
    print(PAGE)
