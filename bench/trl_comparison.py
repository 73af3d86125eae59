"""Slipstream against TRL's GRPOTrainer on one machine: same model, task, batch and optimizer, both with all cores.

Per seed the two run one after the other (order alternates). Time starts when set-up is over: for TRL at the start of
training, for Slipstream when the first group is leased. Writes bench/results/NAME.json.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import jobs
import machine


def run_trl(args: argparse.Namespace, seed: int) -> dict:
    command = [args.trl_python, str(jobs.ROOT / "bench" / "trl_grpo.py"), "--seed", str(seed)]
    for name in ("model", "dataset", "steps", "max_tokens", "lr", "threads", "micro_batch"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, cwd=tempfile.mkdtemp())
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(done.stderr[-2000:])
    result = json.loads(lines[0][7:])
    hit = next((x for x in result["curve"] if x["reward_smoothed"] >= 0.9), None)
    result["seconds_to_0.9"] = hit and hit["time_s"]
    result["steps_to_0.9"] = hit and hit["step"]
    result["samples_per_s"] = round(result["samples"] / result["wall_s"], 2)
    return result


def run_ours(args: argparse.Namespace, seed: int, run_dir: Path) -> dict:
    job = jobs.run(
        args.config, run_dir, f"run.seed={seed}", f"run.steps={args.steps}", *args.overrides, timeout_s=args.timeout
    )
    samples = job.total("groups") * args.group_size
    return {
        "system": "slipstream",
        "seed": seed,
        "wall_s": round(job.wall_s, 2),
        "samples": samples,
        "samples_per_s": round(samples / job.wall_s, 2),
        "seconds_to_0.9": job.seconds_to_reward(0.9),
        "steps_to_0.9": job.steps_to_reward(0.9),
        "learner_idle_s": round(job.total("learner_idle_s"), 2),
        "step_s": round(job.total("step_s"), 2),
        "publish_s": round(job.total("publish_s"), 2),
        "generation_stall_s": round(job.total("generation_stall_s"), 2),
        "curve": [round(x["reward_mean"], 3) for x in job.lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="python of the environment with bench/requirements-trl.txt")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--name", default="trl_comparison")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="slipstream-bench-"))
    pairs = []
    for i, seed in enumerate(args.seeds):
        runs: dict[str, dict] = {}
        for system in ("ours", "trl") if i % 2 == 0 else ("trl", "ours"):
            runs[system] = run_ours(args, seed, scratch / f"seed{seed}") if system == "ours" else run_trl(args, seed)
        pairs.append({"seed": seed, **runs})
        ratio = runs["ours"]["samples_per_s"] / runs["trl"]["samples_per_s"]
        pairs[-1]["throughput_ratio"] = round(ratio, 3)
        reached = [runs[x]["seconds_to_0.9"] for x in ("trl", "ours")]
        pairs[-1]["time_to_0.9_ratio"] = round(reached[0] / reached[1], 3) if all(reached) else None
        print(
            f"seed {seed}: samples/s ours/trl {ratio:.2f}, seconds to 0.9 trl {reached[0]} ours {reached[1]}",
            flush=True,
        )
    result = {
        "machine": machine.describe(),
        "arguments": {
            k: v
            for k, v in vars(args).items()
            if k in ("config", "steps", "max_tokens", "lr", "threads", "micro_batch", "overrides")
        },
        "pairs": pairs,
        "throughput_ratio_median": statistics.median(p["throughput_ratio"] for p in pairs),
    }
    print(jobs.write(args.name, result))


if __name__ == "__main__":
    main()
