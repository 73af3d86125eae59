"""The quickstart over several seeds: python bench/quickstart.py [--seeds 1 2 3].

Each seed runs launch/quickstart.sh in this checkout. Its RUN folder under runs/ must not exist yet.
"""

import re

import harness


def run(seed: int) -> dict:
    run_dir = harness.ROOT / "runs" / f"quickstart{'' if seed == 1 else f'-seed{seed}'}"
    if run_dir.exists():
        raise RuntimeError(f"{run_dir} exists; the quickstart would not run again")
    output = harness.command("bash", "launch/quickstart.sh", f"run.seed={seed}", timeout_s=1800)
    said = re.search(r"finished (\d+) s after the installation", output)
    if said is None:
        raise RuntimeError(f"the quickstart named no time: {output[-2000:]}")
    job = harness.read(run_dir)
    return {
        "seed": seed,
        "seconds_after_installation": int(said[1]),
        **job.progress(0.9),
        **job.evaluation(),
        "training_s": round(job.wall_s, 1),
    }


@harness.script(seeds=[1, 2, 3])
def main(options: harness.Options) -> harness.Figures:
    runs = [run(seed) for seed in options.seeds]
    return {"rounds": len(runs), "runs": runs}
