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
leases ahead of need, engines that advance all their requests one token a step. What it knows of an engine: the seconds
of a step by how many requests run, of a token of context, of a call, of a prefill. Of a learner: the seconds of a
step, of a token, of a token squared. And of a machine that both share: how much slower each is while the other works.
"""


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def rows_of(one: dict) -> list[list[object]]:
    """A round: its synchronous run, then the others."""
    return [
        [
            one["seed"],
            mode["staleness"],
            f"{mode['wall_s']:.1f}",
            f"{mode['learner_idle_s']:.1f}",
            f"{mode['wall_s'] / mode['simulated_s']:.2f}",
            *(
                [f"{mode['gain']:.2f}", f"{mode['simulated_gain']:.2f}", f"{mode['share_of_simulated']:.2f}"]
                if mode["staleness"]
                else ["", "", ""]
            ),
        ]
        for mode in one["modes"]
    ]


def measured() -> str:
    """Real processes against their simulation."""
    found = json.loads((RESULTS / "async_tail.json").read_text())
    rounds, machine = found["rounds"], found["machine"]
    first = rounds[0]["modes"][0]
    medians = "; ".join(
        f"{m['gain']:.2f} with a window of {m['staleness']}, {m['share_of_simulated']:.2f} of what the simulation "
        f"of the same lengths says is possible ({m['simulated_gain']:.2f}; "
        f"{m['simulated_apart_gain']:.2f} if engine and "
        "learner did not slow each other)"
        for m in found["medians"]
    )
    head = [
        "seed",
        "staleness.max",
        "s",
        "of these the learner waits",
        "s / simulated",
        "gain",
        "simulated gain",
        "share",
    ]
    return (
        "## Measured\n\n"
        f"One learner and one node ({machine['processor']}, {machine['cores']} cores, no accelerator), "
        f"{found['steps']} steps of 16 groups of 8 episodes, 4 % of them long: "
        f"{first['length_mean']:.0f} tokens in the mean, {first['length_max']} at most. Seconds are from the end "
        "of the first step to the end of the last one, with the wait for the last stragglers.\n\n"
        + table(head, [row for one in rounds for row in rows_of(one)])
        + f"\nMedian gain: {medians}. The speeds are measured anew in every round, none of them asynchronously: "
        "the learner's in the synchronous one, the engine's without a job, and what they cost each other by a replay "
        "of the synchronous run beside an engine that is never idle. The runs of a round draw other lengths, and the "
        "simulation of each has its own.\n"
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
