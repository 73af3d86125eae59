"""A student with a teacher and with rewards alone: samples until it comes near the teacher, over seeds.

The student is the quickstart's warm start, made sloppier: it guesses at once in nearly all answers, and forgets
carries. So rewards are sparse at first. The teacher is another model, which saw clean demonstrations only.
`slipstream scorer` serves it with vLLM, as the node's engine is vLLM. Each way trains the student by `slipstream up`
with the quickstart's config and one change. The script counts samples until the mean reward of WINDOW steps is --share
of the teacher's accuracy. That accuracy is on held-out problems, sampled at temperature 1 like the rewards. Models in
runs/ and finished runs in --folder are not made again.

    python bench/distillation.py --folder runs/distillation [--seeds 1 2 3] [--steps 36]
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import yaml

from launch.quickstart.assets import AdditionPlan, addition_demonstrations, addition_pairs, write_rows

WINDOW = 3
SLOPPIER = AdditionPlan(clean=0, sloppy=1920, blurted=0.97, forgotten=0.9)
PORT = 18431
WAYS: dict[str, dict[str, Any] | None] = {  # learner.loss.distillation
    "rewards": None,
    "teacher": {"teacher": "teacher", "objective": "reverse_kl", "alone": True},
}
RUNS = harness.ROOT / "runs"
WARM = RUNS / "quickstart-sft"
STUDENT = RUNS / "student-sft"
TEACHER = RUNS / "teacher-sft"
QUICKSTART = "configs/quickstart.yaml"


def make_models() -> None:
    """The quickstart's problems and warm start, a sloppier student, and a teacher from another initialisation."""
    cli = ("-m", "launch.cli", "sft", "configs/quickstart-sft.yaml")
    for seed, folder in ((1, RUNS / "assets"), (2, RUNS / "assets-seed2")):
        harness.python("-m", "launch.quickstart.assets", "--out", folder, "--seed", seed)
    if not (WARM / "model" / "config.json").exists():
        harness.python(*cli, f"run.dir={WARM}")
    if not (STUDENT / "model" / "config.json").exists():
        rng = random.Random("distillation")
        rows = RUNS / "assets" / "sloppier.jsonl"
        write_rows(rows, addition_demonstrations(SLOPPIER, addition_pairs(SLOPPIER, rng)[2], rng))
        words = (f"model.path={WARM / 'model'}", f"tasks.dataset={rows}", "run.steps=60", "learner.optimizer.lr=1e-3")
        harness.python(*cli, f"run.dir={STUDENT}", *words)
    if not (TEACHER / "model" / "config.json").exists():
        model = f"model.path={RUNS / 'assets-seed2' / 'model'}"
        harness.python(*cli, f"run.dir={TEACHER}", "run.seed=2", model, "run.steps=600")  # before the sloppy ones


def config_of(way: str, folder: Path) -> Path:
    """The quickstart's config with the way's one change."""
    document = yaml.safe_load((harness.ROOT / QUICKSTART).read_text())
    document["model"]["path"] = str(STUDENT / "model")
    told = WAYS[way]
    if told is not None:
        document["learner"]["loss"]["distillation"] = told
        serve = {"model": str(TEACHER / "model"), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 64}
        serve["kv_cache_memory_bytes"] = 64 << 20
        url = f"http://127.0.0.1:{PORT}/v1"
        document["scorers"] = {"teacher": {"url": url, "model": "teacher", "kind": "teacher", "serve": serve}}
    path = folder / f"{way}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def served(config: Path, folder: Path) -> Iterator[None]:
    """The teacher behind its endpoint."""
    log = folder / "scorer.log"
    words = [sys.executable, "-m", "launch.cli", "scorer", str(config), "teacher", f"run.dir={folder / 'scorer'}"]
    with log.open("w") as out:
        role = subprocess.Popen(words, cwd=harness.ROOT, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 300
        while "is served" not in log.read_text():
            if role.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the teacher is not served: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        role.send_signal(signal.SIGTERM)
        role.wait()


def reached(rewards: list[float], level: float) -> int | None:
    """Steps until the mean of WINDOW steps is at least `level`."""
    means = (statistics.mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1))
    return next((end for end, mean in enumerate(means, WINDOW) if mean >= level), None)


def trained(config: Path, way: str, folder: Path, *, seed: int, steps: int) -> dict[str, Any]:
    """One job's figures, which are kept in `folder`."""
    kept = folder / f"{way}-{seed}.json"
    if not kept.exists():
        job = harness.run(config, folder / f"{way}-{seed}", f"run.seed={seed}", f"run.steps={steps}")
        found = {
            "way": way,
            "seed": seed,
            "reward_first_3": job.reward(slice(WINDOW)),
            "reward_last_10": job.reward(slice(-10, None)),
            "teacher_kl_first_3": round(statistics.mean(line["teacher_kl_mean"] for line in job.lines[:WINDOW]), 4),
            "teacher_kl_last_10": round(statistics.mean(line["teacher_kl_mean"] for line in job.lines[-10:]), 4),
            "teacher_s": round(job.mean("teacher_s"), 4),
            "samples_failed": job.total("samples_failed"),
            "wall_s": round(job.wall_s, 1),
            "samples": [line["samples"] for line in job.lines],
            "rewards": [round(reward, 4) for reward in job.rewards],
        }
        kept.write_text(json.dumps(found))
        print(way, seed, found["rewards"], found["wall_s"], flush=True)
    return json.loads(kept.read_text())


def teacher_accuracy(config: Path, folder: Path) -> float:
    """The teacher's on held-out problems, sampled."""
    kept = folder / "teacher" / "eval.json"
    if not kept.exists():
        words = ("--model", TEACHER / "model", f"run.dir={folder / 'teacher'}")
        harness.python("-m", "launch.cli", "eval", config, *words)
    return json.loads(kept.read_text())["sampled_accuracy"]


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, its samples in the order of the seeds."""
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        samples = ["never" if run["steps_to_teacher"] is None else f"{run['samples_to_teacher']:,}" for run in own]
        means = {name: statistics.mean(run[name] for run in own) for name in ("reward_first_3", "reward_last_10")}
        rows.append({"way": way, "samples": ", ".join(samples), **means})
    return rows


@harness.script(folder=Path, seeds=[1, 2, 3], steps=36, share=0.5, name="distillation")
def main(options: harness.Options) -> harness.Figures:
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    make_models()
    configs = {way: config_of(way, folder) for way in WAYS}
    accuracy = teacher_accuracy(configs["rewards"], folder)
    runs: list[dict[str, Any]] = []
    wanted = [(way, seed) for seed in options.seeds for way in WAYS]
    done = all((folder / f"{way}-{seed}.json").exists() for way, seed in wanted)
    with contextlib.nullcontext() if done else served(configs["teacher"], folder):
        for way, seed in wanted:
            run = trained(configs[way], way, folder, seed=seed, steps=options.steps)
            needed = reached(run["rewards"], options.share * accuracy)
            samples = None if needed is None else sum(run["samples"][:needed])
            runs.append(run | {"steps_to_teacher": needed, "samples_to_teacher": samples})
    level = {"teacher_accuracy": accuracy, "share": options.share, "window": WINDOW, "steps": options.steps}
    return {"rounds": len(options.seeds), **level, "ways": table(runs), "runs": runs}
