"""The quickstart with rollouts in 8 bits: python bench/quantized.py [--seeds 1] [--steps 60].

Every way starts from the model that launch/quickstart.sh left in runs/quickstart-sft. Their RUN folders are
runs/quantized-WAY-seedN, which must not exist yet. Short mode: --steps 2 --dry.
"""

import statistics

import harness

WAYS = {
    "float32, tis": [],
    "fp8, tis": ["rollout.engine.quantization=fp8_per_channel"],
    "fp8, none": ["rollout.engine.quantization=fp8_per_channel", "learner.loss.correction=none"],
}


def run(way: str, seed: int, steps: int) -> dict:
    folder = harness.ROOT / f"runs/quantized-{way.replace(', ', '-')}-seed{seed}"
    if folder.exists():
        raise RuntimeError(f"{folder} exists; it would not run again")
    own = [f"run.seed={seed}", f"run.steps={steps}", *WAYS[way]]
    job = harness.run("configs/quickstart.yaml", folder, *own, timeout_s=3600)
    harness.python("-m", "launch.cli", "eval", folder)
    mismatch = [line["mismatch_abs_mean"] for line in job.lines]
    return {
        "seed": seed,
        **job.progress(0.9),
        **job.evaluation(),
        "mismatch_abs_mean": round(statistics.median(mismatch), 5),
        "ratio_p99": round(statistics.median(line["ratio_p99"] for line in job.lines), 4),
    }


@harness.script(seeds=[1], steps=60)
def main(options: harness.Options) -> harness.Figures:
    found = harness.in_turns(list(WAYS), options.seeds, lambda way, seed: run(way, seed, options.steps))
    return {"rounds": len(options.seeds), "runs": [{"way": way} | one for way, ones in found.items() for one in ones]}
