"""The rows of docs/benchmarks.md: figures of sections.yaml, and one function for each result that needs computing."""

import statistics
from pathlib import Path
from typing import Any

import yaml

from bench.figures import COLUMNS, Row, filled, flat, provenance, ratios, result, table, values

SIZES = {"1k": "8 x 1,280 tokens", "8k": "8 x 8,448 tokens"}
PEERS = {"redis_pickled_lists": "a Redis stream of pickled lists", "msgspec_lists_zeromq": "msgspec lists over ZeroMQ"}
DURABILITIES = {"memory": "in memory", "everysec": "synced every second", "fsync": "synced before it is acknowledged"}


def async_tail() -> list[Row]:
    rounds = result("async_tail")["rounds"]
    rows = []
    for window in [m["staleness"] for m in rounds[0]["modes"] if m["staleness"]]:
        modes = [m for one in rounds for m in one["modes"] if m["staleness"] == window]
        shares = [m["share_of_simulated"] for m in modes]
        rows += [
            Row(f"times faster than synchronous, window {window}", [m["gain"] for m in modes], ".1f", at_least=2.5),
            Row(f"share of the simulated gain, window {window}", shares, at_least=0.95),
        ]
    return rows


def simulate() -> list[Row]:
    many = max(result("simulate")["predictions"], key=lambda p: p["setup"]["nodes"])
    setup = many["setup"]
    what = f"times faster than synchronous, {setup['nodes']:,} nodes, window {setup['staleness']} (predicted)"
    return [Row(what, [many["gain"]], ".1f")]


def step_overhead() -> list[Row]:
    peers = ("bare_megatron", "bare Megatron-Core's", 1.03), ("hugging_face", "Hugging Face's, padded", None)
    rows = []
    for name, shape in result("step_overhead")["shapes"].items():
        for key, words, aim in peers:
            values = list(shape[f"learner_over_{key}"].values())
            rows.append(Row(f"CPU time of a step over {words}, shape `{name}`", values, at_most=aim))
    return rows


def packing() -> list[Row]:
    found = [r for r in result("packing")["rows"] if r["attention_weighed"]]
    rows = [Row("real over computed tokens, all layouts", [r["real_over_computed_tokens"] for r in found], ".3f")]
    for r in found:
        if r["layout"] == "dense":
            what = f"most loaded rank over the mean, `{r['workload']}`, {r['data_parallel']} data-parallel ranks"
            rows.append(Row(what, [100 * r["imbalance_mean"]], ".2f", "% more"))
    return rows


def broker_overhead() -> list[Row]:
    rows = []
    for size, measured in result("broker_overhead")["sizes"].items():
        cpu = {name: way["rounds_us"] for name, way in measured["ways"].items()}
        group = f"groups of {SIZES[size]}"
        for durability, words in DURABILITIES.items():
            values = ratios(cpu[f"slipstream_{durability}"], cpu["raw_zeromq"])
            aim = {"memory": 2.5, "fsync": 3.5}.get(durability)
            rows.append(Row(f"CPU over raw ZeroMQ, {words}, {group}", values, ".1f", at_most=aim))
        for peer, words in PEERS.items():
            values = ratios(cpu[peer], cpu["slipstream_memory"])
            aim = 6 if size == "1k" else 10
            rows.append(Row(f"CPU of {words} over ours in memory, {group}", values, ".1f", at_least=aim))
    return rows


def broker_ray() -> list[Row]:
    what, sizes = "CPU of a Ray actor queue over raw ZeroMQ, groups of", result("broker_ray")["sizes"]
    return [Row(f"{what} {SIZES[size]}", [found["times_raw_zeromq"]], ".1f") for size, found in sizes.items()]


def broker_redis() -> list[Row]:
    rows = []
    for name, measured in result("broker_redis")["results"].items():
        ours, floor = (measured["ways"][way]["rounds_us"] for way in ("slipstream", "raw_streams"))
        size, _, appendfsync = name.partition("_")
        what = f"CPU over pipelined raw Redis streams, `appendfsync {appendfsync}`, groups of {SIZES[size]}"
        rows.append(Row(what, ratios(ours, floor), at_most=1.3))
    return rows


def flip_cost() -> list[Row]:
    found = result("flip_cost")
    rows = []
    for window in (0, 2):
        runs = [r for r in found["runs"] if r["staleness_max"] == window]
        copies = [100 * r["learner_copy_share_of_step"] for r in runs]
        active = [1e3 * r["seconds_to_active_median"] for r in runs]
        rows += [
            Row(f"learner's time for publishing, window {window}", copies, ".1f", "% of a step", at_most=2),
            Row(f"generation stopped by a flip, window {window}", [r["stall_per_flip_ms"] for r in runs], ".1f", "ms"),
            Row(f"optimizer step to version in use, window {window}", active, ".0f", "ms"),
        ]
    megabytes = max(engine["payload_bytes"] for engine in found["engine"]) / 1e6
    stalls = [engine["stall_ms"] for engine in found["engine"]]
    return [*rows, Row(f"generation stopped by a flip, loaded engine of {megabytes:.0f} MB", stalls, ".1f", "ms")]


def node_throughput() -> list[Row]:
    found = result("node_throughput")
    rows = []
    for turns, one in (("one turn", found), ("four turns", found["multi_turn"])):
        for figure, name in (("wall_s", "second"), ("cpu_s", "CPU second")):
            node, bare = ([r["tokens"] / r[figure] for r in one[side]["rounds"]] for side in ("node", "bare"))
            aim = 0.97 if (turns, figure) == ("one turn", "wall_s") else None
            what = f"tokens per {name}, node over bare `LLM.generate`, {turns}"
            rows.append(Row(what, ratios(node, bare), at_least=aim))
    return rows


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


FUNCTIONS = (
    async_tail, simulate, step_overhead, packing, broker_overhead, broker_ray, broker_redis, flip_cost, node_throughput,
    adaptive_concurrency,
)  # fmt: skip
COMPUTED = {function.__name__: function for function in FUNCTIONS}  # by the name of the result
SECTIONS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("sections.yaml").read_text())


def rows(name: str) -> list[Row]:
    """All rows of the section with this result."""
    if name in COMPUTED:
        return COMPUTED[name]()
    section = next(section for section in SECTIONS if section["result"] == name)
    return [row for figure in section["figures"] for row in rows_of(result(name), **figure)]


def rows_of(
    found: dict[str, Any], what: str, value: str, of: str | None = None, each: bool = False, **looks: Any
) -> list[Row]:
    measured = found[of] if of else found
    fields = [flat(one) for one in (measured if isinstance(measured, list) else [measured])]
    shown = [[one] for one in fields] if each else [fields]
    return [Row(filled(what, some[0]), [x for one in some for x in values(value, one)], **looks) for some in shown]


def all_sections() -> str:
    """Every section: its source, then one row a figure."""
    parts = []
    for section in SECTIONS:
        cells = [row.cells for row in rows(section["result"])]
        parts.append(f"## {section['title']}\n\n{provenance(section['result'])}\n\n{table(COLUMNS, cells)}")
    return "\n\n".join(parts)
