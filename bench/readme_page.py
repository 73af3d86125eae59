"""The README's table of the fleet, from bench/results: python bench/readme_page.py."""

import json
from pathlib import Path
from typing import Any

from launch.dev.doc_markers import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "README.md", ROOT / "bench" / "results"
BEGIN, END = "<!-- the fleet: bench/readme_page.py writes it -->", "<!-- end of the fleet -->"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def link(name: str, verdict: str = "") -> str:
    return f"{verdict}: [{name}](bench/results/{name}.json)" if verdict else f"[{name}](bench/results/{name}.json)"


def judge(met: bool) -> str:
    return "met" if met else "missed"


def span(values: list[float], form: str) -> str:
    """'3 to 5', or one figure where rounding leaves one."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def render() -> str:
    """The table between the marks."""
    head = ["| what | figure | aim | result |", "|---|---|---|---|"]
    rows = [*weight_rows(), *flip_rows(), *delta_rows(), *node_rows(), *adaptive_rows(), *asynchrony_rows()]
    return "\n".join([*head, *rows, *game_rows()])


def weight_rows() -> list[str]:
    measured = result("weight_broadcast")
    large, small, *alone = measured["broadcast"]
    ratios = " / ".join(f"{row['over_flat']:.2f}" for row in alone)
    one = f" (to one node: {ratios})" if alone else ""
    flat, faster = [large["over_flat"], small["over_flat"]], small["times_faster_than_per_parameter"]
    sizes = f"{large['bytes'] / 1e6:.0f} MB in {large['tensors']} tensors / {small['bytes'] / 1e6:.0f} MB in"
    death = {row["signal"]: row["others_have_it_s"] for row in measured["death"]}
    join, joins = measured["join"], result("join")
    group, process = joins["engine_to_first_group_s"], joins["process_to_first_group_s"]
    return [
        f"| verified broadcast to 2 nodes against one flat broadcast of the same bytes, {sizes} {small['tensors']:,} | "
        f"{flat[0]:.2f} / {flat[1]:.2f} times its time{one} | 1.10 | "
        f"{link('weight_broadcast', ' / '.join(judge(ratio <= 1.10) for ratio in flat))} |",
        f"| the same against a broadcast per parameter, {small['tensors']:,} tensors | {faster:.0f} times faster | 3 | "
        f"{judge(faster >= 3)}: the same |",
        f"| a newcomer: from an engine that is ready to weights in use, {join['bytes'] / 1e6:.0f} MB, from "
        "the learner / "
        f"from a peer | {join['from_learner_s']:.1f} / {join['from_peer_s']:.1f} s | seconds | the same |",
        f"| a node that joins a running job, both cores busy: from an engine that is ready / from the start of its "
        f"process to its first group, median of {len(joins['joins'])} (worst) | {group['median']:.1f} "
        f"({group['worst']:.1f}) / {process['median']:.0f} ({process['worst']:.0f}) s | seconds | {link('join')} |",
        f"| a member gets `kill -9` / SIGSTOP in the middle of a broadcast: the others run the version after | "
        f"{death['SIGKILL']:.1f} / {death['SIGSTOP']:.1f} s | `weights.timeout_s`: {measured['timeout_s']:g} s | "
        f"{link('weight_broadcast')} |",
    ]


def flip_rows() -> list[str]:
    measured = result("flip_cost")
    runs = measured["runs"]
    shares = [100 * run["learner_copy_share_of_step"] for run in runs]
    stalls = span([run["stall_per_flip_ms"] for run in runs], ".0f")
    of_step = span([100 * run["stall_share_of_step"] for run in runs], ".1f")
    active = {k: [1e3 * r["seconds_to_active_median"] for r in runs if r["staleness_max"] == k] for k in (0, 2)}
    loaded = span([engine["stall_ms"] for engine in measured["engine"]], ".0f")
    payload = max(engine["payload_bytes"] for engine in measured["engine"]) / 1e6
    return [
        f"| learner's time lost to publishing | {span(shares, '.1f')} % of the step | 2 % | "
        f"{link('flip_cost', judge(max(shares) <= 2))} |",
        f"| a weight flip: generation stalled, in the quickstart's job / a loaded engine of {payload:.0f} MB | "
        f"{stalls} ms, "
        f"{of_step} % of the step / {loaded} ms | - | the same |",
        f"| optimizer step to the new version in use, generation idle / both cores busy (medians) | "
        f"{span(active[0], '.0f')} / {span(active[2], '.0f')} ms | - | the same |",
    ]


def delta_rows() -> list[str]:
    rows = {row["lr"]: row for row in result("delta")["rows"] if row["dtype"] == "bfloat16"}
    low, high = rows[min(rows)], rows[max(rows)]
    return [
        f"| exact deltas of bfloat16 weights at learning rate {min(rows):g} / {max(rows):g}: bytes; "
        "encoding and applying "
        f"{low['full_bytes'] / 1e6:.0f} MB | 1/{1 / low['share']:.0f} / 1/{1 / high['share']:.0f}; "
        f"{1e3 * low['encode_s']:.0f} and {1e3 * low['apply_s']:.0f} / {1e3 * high['encode_s']:.0f} and "
        f"{1e3 * high['apply_s']:.0f} ms | - | {link('delta')} |"
    ]


def node_rows() -> list[str]:
    measured = result("node_throughput")
    one, turns = measured["ratio_tokens_per_s"], measured["multi_turn"]
    return [
        f"| node against bare `LLM.generate`, same prompts and cores / episodes of {turns['arguments']['turns']} turns "
        f"against as many bare calls | {one:.2f} / {turns['ratio_tokens_per_s']:.2f} of its tokens per second | "
        "0.97 / - | "
        f"{link('node_throughput', judge(one >= 0.97))} |"
    ]


def adaptive_rows() -> list[str]:
    measured = result("adaptive_concurrency")
    runs = [(case, run) for case, runs in measured["cases"].items() for run in runs.values()]
    rates = [{arm: found["tokens_per_s"] for arm, found in run.items()} for _, run in runs]
    shares = [rate["auto"] / max(rate[arm] for arm in rate if arm != "auto") for rate in rates]
    fixed = ", ".join(map(str, measured["fixed_places"]))
    return [
        f"| `rollout.concurrency: auto` against the best of {fixed} places, {len(measured['cases'])} workloads, "
        f"{len(runs)} runs | "
        f"{span(shares, '.2f')} of its tokens per second | - | "
        "[figures](docs/scheduling.md#how-many-episodes) |"
    ]


def asynchrony_rows() -> list[str]:
    found = result("async_tail")
    windows = found["medians"]
    shapes = " / ".join(str(window["staleness"]) for window in windows)
    gains, shares = [w["gain"] for w in windows], [w["share_of_simulated"] for w in windows]
    verdicts = " / ".join(judge(gain >= 2.5) for gain in gains)
    many = max(result("simulate")["predictions"], key=lambda p: p["setup"]["nodes"])
    return [
        f"| async against synchronous, heavy-tailed lengths, `staleness.max` {shapes}, {len(found['rounds'])} rounds | "
        f"{' / '.join(f'{gain:.1f}' for gain in gains)} times faster; "
        f"{' / '.join(f'{share:.2f}' for share in shares)} of the simulated gain | 2.5 times; 0.95 | "
        f"{verdicts}; {judge(min(shares) >= 0.95)}: [figures](docs/asynchrony.md) |",
        f"| the same simulated, {many['setup']['nodes']:,} nodes, `staleness.max: {many['setup']['staleness']}` | "
        f"{many['gain']:.0f} times faster | - | predicted, not measured: the same |",
    ]


def game_rows() -> list[str]:
    runs = result("guessing")["runs"]
    first, last = [run["success_first_5"] for run in runs], [run["success_last_10"] for run in runs]
    return [
        f"| the multi-turn game, weights changing inside episodes, {len(runs)} seed{'s' * (len(runs) > 1)}: success in "
        f"{runs[0]['steps']} steps | {span(first, '.2f')} before, {span(last, '.2f')} after | 0.85 | "
        f"{judge(min(last) >= 0.85)}: [curve](docs/environments.md) |"
    ]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, f"\n\n{render()}\n\n"))
