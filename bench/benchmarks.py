"""The rows of docs/benchmarks.md, one function a result; bench/pages.py writes them."""

from collections.abc import Callable, Sequence

from bench.figures import COLUMNS, Row, provenance, ratios, result, table

SIZES = {"1k": "8 x 1,280 tokens", "8k": "8 x 8,448 tokens"}
PEERS = {"redis_pickled_lists": "a Redis stream of pickled lists", "msgspec_lists_zeromq": "msgspec lists over ZeroMQ"}
DURABILITIES = {
    "memory": "in memory",
    "everysec": "synced every second",
    "fsync": "synced before it is acknowledged",
}


def quickstart() -> list[Row]:
    runs = result("quickstart")["runs"]
    return [
        Row("time after the installation", [r["seconds_after_installation"] for r in runs], ".0f", "s"),
        Row("training alone", [r["training_s"] for r in runs], ".0f", "s"),
        Row("reward, first 5 steps", [r["reward_first_5"] for r in runs]),
        Row("reward, last 10 steps", [r["reward_last_10"] for r in runs], ".3f"),
        Row("greedy accuracy on held-out problems", [r["greedy_accuracy"] for r in runs], ".3f"),
        Row("largest staleness of a trained token", [r["staleness_max"] for r in runs], ".0f", "versions", at_most=2),
    ]


def trl_tiny() -> list[Row]:
    pairs = result("trl_comparison_tiny")["pairs"]
    return [
        Row("seconds to reward 0.9, TRL's over ours", [p["time_to_0.9_ratio"] for p in pairs], at_least=1.5),
        Row("samples trained per second, ours over TRL's", [p["throughput_ratio"] for p in pairs]),
    ]


def trl_long() -> list[Row]:
    pairs = result("trl_comparison_long_tail")["pairs"]
    return [
        Row("samples trained per second, ours over TRL's", [p["throughput_ratio"] for p in pairs], ".1f", at_least=3)
    ]


def async_gain() -> list[Row]:
    pairs = result("async_gain")["pairs"]
    to_reward = [p["asynchronous"]["seconds_to_0.9"] / p["synchronous"]["seconds_to_0.9"] for p in pairs]
    return [
        Row("time to the same steps, window 2 over window 0", [p["measured_ratio"] for p in pairs]),
        Row("seconds to reward 0.9, window 2 over window 0", to_reward),
        Row("ratio that the measured parts allow", [p["ideal_ratio"] for p in pairs]),
        Row("share of the ideal gain", [p["share_of_ideal_gain"] for p in pairs], at_least=0.9),
    ]


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


def simulated() -> list[Row]:
    many = max(result("simulate")["predictions"], key=lambda p: p["setup"]["nodes"])
    setup = many["setup"]
    what = f"times faster than synchronous, {setup['nodes']:,} nodes, window {setup['staleness']} (predicted)"
    return [Row(what, [many["gain"]], ".1f")]


def step_overhead() -> list[Row]:
    rows = []
    for name, shape in result("step_overhead")["shapes"].items():
        for key, other in (("bare_megatron", "bare Megatron-Core's"), ("hugging_face", "Hugging Face's, padded")):
            found = shape[f"learner_over_{key}"]
            aim = 1.03 if key == "bare_megatron" else None
            values = [found["lowest"], found["median"], found["highest"]]
            rows.append(Row(f"CPU time of a step over {other}, shape `{name}`", values, at_most=aim))
    return rows


def logprob_memory() -> list[Row]:
    rows = []
    for found in result("logprob_memory")["rows"]:
        size = f"vocabulary {found['vocabulary']:,}"
        beyond = [found["chunked_kib_per_token_beyond_gradients"]]
        rows += [
            Row(f"memory per token beyond the gradients, {size}", beyond, ".0f", "KiB"),
            Row(f"peak memory, naive over ours, {size}", [found["naive_over_chunked"]], ".1f"),
        ]
    return rows


def packing() -> list[Row]:
    found = [r for r in result("packing")["rows"] if r["attention_weighed"]]
    dense = [r for r in found if r["layout"] == "dense"]
    rows = [Row("real over computed tokens, all layouts", [r["real_over_computed_tokens"] for r in found], ".3f")]
    rows += [
        Row(
            f"most loaded rank over the mean, `{r['workload']}`, {r['data_parallel']} data-parallel ranks",
            [100 * r["imbalance_mean"]],
            ".2f",
            "% more",
        )
        for r in dense
    ]
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
    sizes = result("broker_ray")["sizes"]
    return [
        Row(f"CPU of a Ray actor queue over raw ZeroMQ, groups of {SIZES[size]}", [found["times_raw_zeromq"]], ".1f")
        for size, found in sizes.items()
    ]


def broker_redis() -> list[Row]:
    rows = []
    for name, measured in result("broker_redis")["results"].items():
        ours, floor = (measured["ways"][way]["rounds_us"] for way in ("slipstream", "raw_streams"))
        group = f"groups of {SIZES[name.partition('_')[0]]}"
        rows.append(Row(f"CPU over pipelined raw Redis streams, {group}", ratios(ours, floor), at_most=1.3))
    return rows


def broker_recovery() -> list[Row]:
    found = result("broker_recovery")
    name = f"a store of {found['groups']:,} groups"
    return [
        Row(f"recovery from {name}, all committed", [found["a_run_as_usual"]["recovery_s"]], ".2f", "s"),
        Row(f"recovery from {name}, none committed", [found["nothing_committed"]["recovery_s"]], ".2f", "s"),
    ]


def guarantees() -> list[Row]:
    scenarios = result("guarantees")["scenarios"]
    return [
        Row(f"three new steps after a fault: `{name}`", scenarios[name]["recoveries_s"], ".2f", "s")
        for name in ("broker_killed", "learner_killed", "node_killed", "all_killed")
    ]


def weight_broadcast() -> list[Row]:
    found = result("weight_broadcast")
    rows = []
    for r in found["broadcast"]:
        name = f"{r['bytes'] / 1e6:.0f} MB in {r['tensors']:,} tensors, {r['nodes']} nodes"
        rows += [
            Row(f"time of a verified broadcast over a flat one, {name}", [r["over_flat"]], at_most=1.1),
            Row(f"times faster than a broadcast per parameter, {name}", [r["times_faster_than_per_parameter"]], ".1f"),
        ]
    size = f"{found['join']['bytes'] / 1e6:.0f} MB"
    rows += [
        Row(f"ready engine to weights in use, {size}, from {peer}", [found["join"][f"from_{peer}_s"]], ".2f", "s")
        for peer in ("learner", "peer")
    ]
    rows += [
        Row(
            f"others run the next version after {death['signal']} of a receiver",
            [death["others_have_it_s"]],
            ".1f",
            "s",
            at_most=found["timeout_s"],
        )
        for death in found["death"]
    ]
    return rows


def join() -> list[Row]:
    joins = result("join")["joins"]
    return [
        Row("ready engine to first accepted group", [j["engine_to_first_group_s"] for j in joins], ".2f", "s"),
        Row("start of the process to first accepted group", [j["process_to_first_group_s"] for j in joins], ".0f", "s"),
    ]


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


def delta() -> list[Row]:
    rows = []
    for r in result("delta")["rows"]:
        name = f"{r['dtype']}, learning rate {r['lr']:g}"
        rows += [
            Row(f"times smaller than the whole version, {name}", [1 / r["share"]], ".1f"),
            Row(f"encoding {r['full_bytes'] / 1e6:.0f} MB, {name}", [1e3 * r["encode_s"]], ".0f", "ms"),
            Row(f"applying it, {name}", [1e3 * r["apply_s"]], ".0f", "ms"),
        ]
    return rows


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


def adaptive() -> list[Row]:
    cases = result("adaptive_concurrency")["cases"]
    rows = []
    for name, turns in sorted(cases.items()):
        rates = [{arm: found["tokens_per_s"] for arm, found in turn.items()} for turn in turns.values()]
        shares = [rate["auto"] / max(rate[arm] for arm in rate if arm != "auto") for rate in rates]
        rows.append(Row(f"`rollout.concurrency: auto` over the best fixed number, workload `{name}`", shares))
    return rows


def guessing() -> list[Row]:
    runs = result("guessing")["runs"]
    return [
        Row("success, first 5 steps", [r["success_first_5"] for r in runs]),
        Row(f"success, last 10 of {runs[0]['steps']} steps", [r["success_last_10"] for r in runs], at_least=0.85),
    ]


Section = tuple[str, str, Callable[[], list[Row]]]
SECTIONS: Sequence[Section] = (
    ("The quickstart", "quickstart", quickstart),
    ("Against TRL: 0.3 M parameters, short answers", "trl_comparison_tiny", trl_tiny),
    ("Against TRL: 5 M parameters, long-tailed answers", "trl_comparison_long_tail", trl_long),
    ("Asynchronous against synchronous", "async_gain", async_gain),
    ("The same with heavy-tailed lengths", "async_tail", async_tail),
    ("The same, simulated", "simulate", simulated),
    ("The learner's step", "step_overhead", step_overhead),
    ("Memory of log-probabilities and their gradients", "logprob_memory", logprob_memory),
    ("Packing", "packing", packing),
    ("The broker against raw ZeroMQ and the ways of others", "broker_overhead", broker_overhead),
    ("A Ray actor queue", "broker_ray", broker_ray),
    ("Redis", "broker_redis", broker_redis),
    ("The broker's recovery", "broker_recovery", broker_recovery),
    ("Faults", "guarantees", guarantees),
    ("The weight plane", "weight_broadcast", weight_broadcast),
    ("A node that joins a running job", "join", join),
    ("Flips", "flip_cost", flip_cost),
    ("Exact deltas", "delta", delta),
    ("A node against bare vLLM", "node_throughput", node_throughput),
    ("Adaptive concurrency", "adaptive_concurrency", adaptive),
    ("The game of several turns", "guessing", guessing),
)


def all_sections() -> str:
    """Every section: its source, then one row a figure."""
    parts = []
    for title, name, rows in SECTIONS:
        parts.append(f"## {title}\n\n{provenance(name)}\n\n{table(COLUMNS, [row.cells for row in rows()])}")
    return "\n\n".join(parts)
