"""Slipstream against TRL's GRPOTrainer on one machine: same model, task, batch and optimizer, both with all cores.

Per seed the two run one after the other, in alternating order. Time starts when set-up is over: for TRL at the start
of training, for Slipstream when the first group is leased. `--trl-python` is the python of the
environment with bench/requirements-trl.txt.
"""

import json
from pathlib import Path

import harness

GROUP_SIZE = 8


def run_trl(options: harness.Options, seed: int) -> dict:
    names = ("model", "dataset", "steps", "max_tokens", "lr", "threads", "micro_batch")
    words = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(options, name))]
    script = harness.ROOT / "bench" / "trl_grpo.py"
    output = harness.command(options.trl_python, script, "--seed", seed, *words, timeout_s=options.timeout)
    result = next(json.loads(x[7:]) for x in output.splitlines() if x.startswith("RESULT "))
    steps = harness.steps_to([point["reward_mean"] for point in result["curve"]], 0.9)
    result["seconds_to_0.9"] = None if steps is None else result["curve"][steps - 1]["time_s"]
    result["samples_per_s"] = round(result["samples"] / result["wall_s"], 2)
    return result


def run_ours(options: harness.Options, seed: int, run_dir: Path) -> dict:
    words = (f"run.seed={seed}", f"run.steps={options.steps}", *options.overrides)
    job = harness.run(options.config, run_dir, *words, timeout_s=options.timeout)
    samples = job.total("groups") * GROUP_SIZE
    return {**job.progress(0.9), "samples": samples, "samples_per_s": round(samples / job.wall_s, 2)}


def pair(seed: int, ours: dict, trl: dict) -> dict:
    """Both runs of a seed, and both of their ratios."""
    ratio = ours["samples_per_s"] / trl["samples_per_s"]
    reached = trl["seconds_to_0.9"], ours["seconds_to_0.9"]
    print(f"seed {seed}: samples/s ours/trl {ratio:.2f}, seconds to 0.9 trl, ours {reached}", flush=True)
    times = round(reached[0] / reached[1], 3) if all(reached) else None
    return {"seed": seed, "ours": ours, "trl": trl, "throughput_ratio": round(ratio, 3), "time_to_0.9_ratio": times}


@harness.script(
    config="configs/quickstart.yaml", seeds=[1, 2, 3], steps=80, max_tokens=48, lr=3e-4, threads=2, micro_batch=0,
    timeout=1800.0, name="trl_comparison", trl_python=str, model=str, dataset=str, overrides=(),
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    scratch = harness.scratch()

    def run(system: str, seed: int) -> dict:
        return run_trl(options, seed) if system == "trl" else run_ours(options, seed, scratch / f"seed{seed}")

    runs = harness.in_turns(("ours", "trl"), options.seeds, run)
    pairs = [pair(*both) for both in zip(options.seeds, runs["ours"], runs["trl"], strict=True)]
    return {"rounds": len(pairs), "pairs": pairs}
