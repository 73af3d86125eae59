"""Gains from correcting for staleness: the quickstart task at constant lags, with and without, over seeds.

Step s trains on groups that the weights of version max(0, s - lag) sampled. A job's staleness varies with the machine's
load. Here it is constant, so that runs differ in nothing but the lag and the loss. Everything else is the product's:
vLLM samples, learner.batch.batch assembles, Megatron trains. Each run is a process of its own on a core of its own.
Finished runs are kept in --folder, so the study continues where it stopped. Words that are no options override the
config of every run. Also draws docs/img/correction_study.png. Short mode: run.steps=2 --dry --lags 1 --seeds 1.

    python bench/correction_study.py --folder runs/correction-study [--workers 2] [--lags 0 2 8 32] [--seeds 1 2 3]
"""

import asyncio
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from node_throughput import PLAIN, QUIET

from common.config.loading import load_config
from common.config.schema import Config
from common.json_lines import dataset_rows
from common.rollouts import Group, Sample, VersionRun
from rollout_fleet.environments.protocol import Action, StopReason
from rollout_fleet.environments.registry import resolve
from rollout_fleet.episode.sampler_protocol import Generation
from rollout_fleet.episode.token_record import TokenRecord

VARIANTS = {  # docs/corrections.md says what they are
    "none": ["learner.loss.correction=none"],
    "tis": ["learner.loss.correction=tis"],
    "ppo": ["learner.loss.proximal=behavior", "learner.loss.correction=none"],
}
QUICKSTART = "configs/quickstart.yaml"
ENVIRONMENT = {**PLAIN, **QUIET, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


class Sampler:
    """vLLM in this process, with weights that can be exchanged between calls."""

    def __init__(self, config: Config) -> None:
        from rollout_fleet.vllm_patches import worker_process

        worker_process.keep_cpu_weights_live()
        from vllm import LLM

        engine = config.rollout.engine
        self.llm = LLM(
            config.model.path, dtype=config.model.dtype, enforce_eager=True, max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs, kv_cache_memory_bytes=64 << 20, logprobs_mode="processed_logprobs",
            enable_prefix_caching=False, seed=config.run.seed,
        )  # fmt: skip
        self.model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        self.tokenizer = self.llm.get_tokenizer()
        self.config = config

    def load(self, weights: dict[str, Any]) -> None:
        self.model.load_weights(iter(weights.items()))

    def groups(self, problems: list[dict], serial: int, version: int) -> list[Group]:
        """One group per problem, sampled by `version`, which is loaded."""
        from vllm import SamplingParams

        rollout = self.config.rollout
        params = SamplingParams(max_tokens=rollout.max_tokens, temperature=rollout.temperature, logprobs=0)
        environment_class = resolve(self.config.tasks.environment)
        environments = [[environment_class(p, seed=0) for _ in range(rollout.group_size)] for p in problems]
        texts = [asyncio.run(group[0].reset()) for group in environments]
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(rollout.group_size)]
        outputs = iter(self.llm.generate(asked, params, use_tqdm=False))
        return [
            Group(
                serial + i,
                [self._sample(prompt, next(outputs).outputs[0], environment, version) for environment in group],
            )
            for i, (prompt, group) in enumerate(zip(prompts, environments, strict=True))
        ]

    def _sample(self, prompt: list[int], output, environment, version: int) -> Sample:
        tokens = list(output.token_ids)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        action = Action(text=text, tokens=tuple(tokens), ended=output.finish_reason == "stop")
        logprobs = [row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True)]
        record = TokenRecord(turn_rewards=[asyncio.run(environment.step(action)).reward])
        record.observe(prompt)
        record.extend(Generation(tokens, logprobs, [VersionRun(0, version)], output.finish_reason))
        return record.sample(StopReason.STOP if action.ended else StopReason.LENGTH)


def snapshot(backend) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def problems_of(dataset: str) -> list[dict]:
    return [json.loads(row) for _, row in dataset_rows(Path(dataset), "")]


def accuracy(sampler: Sampler) -> float:
    """The mean reward of the loaded weights on held-out problems: rollout.group_size samples of each."""
    groups = sampler.groups(problems_of(sampler.config.evaluation.paths[0]), 0, 0)
    return round(statistics.mean(sample.reward for group in groups for sample in group.samples), 4)


def held_out(overrides: list[str], file: str = QUICKSTART) -> float:
    """`accuracy` of the config's model."""
    return accuracy(Sampler(load_config(Path(file), overrides, Config)))


def trained(overrides: list[str], lag: int, file: str = QUICKSTART) -> dict:
    """The whole run: rewards of the sampling policy, `lag` versions old, and of the last one on held-out problems.

    `times_s` are the ends of steps since the first one began; `clipped` and `batch_kl` are their means.
    """
    import torch

    torch.set_num_threads(1)
    config = load_config(Path(file), [*overrides, f"staleness.max={lag}"], Config)
    sampler = Sampler(config)
    from learner.batch.batch import assemble
    from learner.batch.updates import build_updates, plan_updates
    from learner.loop.rollout_source import RolloutSource
    from learner.loop.step_metrics import loss_figures
    from learner.loop.tasks import RowOrder
    from learner.loop.updates import train_updates
    from learner.megatron.backend import MegatronBackend

    backend = MegatronBackend.of(config)
    source = RolloutSource(config)
    source.attach(backend, 0)
    rows = problems_of(config.tasks.dataset)
    order = RowOrder(len(rows), config.run.seed, shuffle=True).of_epoch(0)
    size = config.learner.groups_per_step
    versions: deque[dict[str, Any]] = deque([snapshot(backend)], maxlen=lag + 1)
    rewards, times_s, clipped, divergences = [], [], [], []
    began = time.monotonic()
    for step in range(config.run.steps):
        sampler.load(versions[0])
        problems = [rows[int(order[i % len(rows)])] for i in range(step * size, (step + 1) * size)]
        groups = sampler.groups(problems, step * size, max(0, step - lag))
        batch = assemble(groups, step, config)
        (parts,) = plan_updates(backend, batch.documents, config, step)
        updates = build_updates(dict(enumerate(batch.documents)), parts, config)
        result, done = train_updates(step, updates, backend, source, lambda: None)
        versions.append(snapshot(backend))
        rewards.append(round(float(batch.statistics.reward_mean), 5))
        times_s.append(round(time.monotonic() - began, 3))
        clipped.append(loss_figures(result)["objective_clip_fraction"])
        divergences.append(done.batch_kl)
    sampler.load(versions[-1])
    means = {"clipped": round(statistics.mean(clipped), 5), "batch_kl": round(statistics.mean(divergences), 6)}
    means["samples_per_step"] = size * config.rollout.group_size
    return {"held_out": accuracy(sampler), "rewards": rewards, "times_s": times_s, **means}


def run(folder: Path, extra: list[str], variant: str, lag: int, seed: int) -> dict:
    """The result of one run, which is kept in `folder`."""
    out = folder / f"{variant}-{lag}-{seed}.json"
    if not out.exists():
        words = [f"run.seed={seed}", *VARIANTS[variant], *extra]
        found = harness.apart(trained, words, lag, **ENVIRONMENT)
        out.write_text(json.dumps(found))
        print(f"{out.stem}: held-out {found['held_out']}", flush=True)
    return json.loads(out.read_text())


def summary(results: list[dict]) -> dict:
    """Figures of one variant at one lag, one entry per seed."""
    steps = [harness.steps_to(r["rewards"], 0.8) for r in results]
    return {"held_out": [r["held_out"] for r in results], "steps_to_0.8": steps}


def plot(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], path: Path) -> None:
    """Reward over steps: a panel per title, and in it a line per name: the mean of its curves, and their range."""
    import numpy as np

    from launch.results.plots import DOTS_PER_INCH, plt

    size = (3.4 * len(panels), 3.2)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for name, curves in lines.items():
            smooth = np.array([np.convolve(curve, np.ones(5) / 5, mode="valid") for curve in curves])
            steps = np.arange(smooth.shape[1]) + 5
            axis.plot(steps, smooth.mean(0), label=name)
            axis.fill_between(steps, smooth.min(0), smooth.max(0), alpha=0.15)
        axis.set(title=title, xlabel="step")
        axis.legend()
    axes[0][0].set_ylabel("reward")
    figure.savefig(path, dpi=DOTS_PER_INCH)


@harness.script(folder=Path, workers=2, lags=[0, 2, 8, 32], seeds=[1, 2, 3], overrides=())
def main(words: harness.Options) -> harness.Figures:
    words.folder.mkdir(parents=True, exist_ok=True)
    # without lag every weight is 1 up to rounding: the variants coincide, and one seed of each shows it
    keys = [
        (v, lag, seed)
        for seed in words.seeds
        for lag in sorted(words.lags, reverse=True)
        for v in VARIANTS
        if lag > 0 or v == "tis" or seed == words.seeds[0]
    ]
    asked = [(words.folder, words.overrides, *key) for key in keys]
    results = harness.on_cores(words.workers, run, asked)
    found: dict[str, dict[int, list[dict]]] = {}
    for (variant, lag, _), one in zip(keys, results, strict=True):
        found.setdefault(variant, {}).setdefault(lag, []).append(one)
    table = {v: {str(lag): summary(r) for lag, r in by_lag.items()} for v, by_lag in found.items()}
    if not words.dry:
        panels = {
            f"staleness {lag}": {v: [r["rewards"] for r in by_lag[lag]] for v, by_lag in found.items()}
            for lag in sorted(words.lags)
        }
        plot(panels, harness.ROOT / "docs" / "img" / "correction_study.png")
    return {"rounds": len(words.seeds), "figures": table}
