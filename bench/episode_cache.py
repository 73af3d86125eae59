"""Keys and values of episodes over flips: `weights.kv_cache` keep, keep_episode and recompute, in a game of many turns.

Three real jobs of bench/talk.py, each with one node. The learner takes an Adam step for every group, so that an episode
meets several flips. Advantages are by chance. Per value of the key:

- tokens per second, in windows that alternate between the jobs;
- share of the prompts' tokens that the prefix cache had;
- `mismatch`: mean |the learner's log-probability at its step - the sampled one|, staleness included;
- `mismatch_of_own_version`: the same with the weights that sampled the token, over a context computed by them alone.

Short mode: `--windows 2`.
"""

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import harness
import talk

SHAPE = talk.Shape(turns=16, answer=24, prompt=64, observation=128, requests=32)
STEP = 1  # groups of a step


def compared(options: harness.Options) -> harness.Figures:
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder, jobs = Path(made), dict[str, talk.NodeJob]()
        talk.build(folder / "model", SHAPE.answer)
        for way in options.ways:
            jobs[way] = talk.NodeJob(
                folder / way, folder / "model", SHAPE, step=STEP, learning=options.lr, weights={"kv_cache": way}
            )
            stack.callback(jobs[way].close)
            jobs[way].settle()
            talk.stop(jobs[way].processes)
        windows = talk.in_windows({**jobs}, options.windows, options.seconds)
        return {way: talk.totals(windows[way]) | differences(job) for way, job in jobs.items()}


def differences(job: talk.NodeJob) -> harness.Figures:
    """Over the steps of the second half: their contexts have met flips from the beginning."""
    later = job.differences[len(job.differences) // 2 :]
    names = ("mismatch", "mismatch_of_own_version", "versions", "staleness")
    found = {name: round(statistics.mean(step[name] for step in later), 7) for name in names}
    return {**found, "steps": len(later), "prefix_hit_rate": round(job.hit_rate, 4)}


@harness.script(windows=12, seconds=4.0, lr=1e-4, ways=["keep", "keep_episode", "recompute"])
def main(options: harness.Options) -> harness.Figures:
    return {"rounds": options.windows, **compared(options)}
