"""GRPO with an exact lag: step s trains on groups that the weights of version max(0, s - lag) sampled.

A job's staleness varies with the machine's load. Here it is constant, so that runs differ in nothing but the lag and
the loss. Everything else is the product's: vLLM samples, learner.batch.batch assembles, Megatron trains; one process,
one core. bench/correction_study.py runs it.
"""

import asyncio
import json
import os
import statistics
from collections import deque
from pathlib import Path

os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import torch

from common.config.loading import load_config
from common.config.schema import Config
from common.rollouts import Group, Sample, VersionRun
from common.wire_types import Array

Weights = dict[str, torch.Tensor]


class Sampler:
    """vLLM in this process, with weights that can be exchanged between calls."""

    def __init__(self, config: Config) -> None:
        from rollout_fleet.vllm_patches import cpu_weights

        cpu_weights.keep_cpu_weights_live()
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

    def load(self, weights: Weights) -> None:
        self.model.load_weights(iter(weights.items()))

    def groups(self, problems: list[dict], serial: int, version: int) -> list[Group]:
        """One group per problem, sampled by `version`, which is loaded."""
        from vllm import SamplingParams

        from rollout_fleet.environments.registry import resolve

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
        from rollout_fleet.environments.protocol import Action

        tokens = list(output.token_ids)
        ended = output.finish_reason == "stop"
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reward = asyncio.run(environment.step(Action(text=text, tokens=tuple(tokens), ended=ended))).reward
        logprobs = [row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True)]
        n = len(prompt)
        return Sample(
            tokens=Array.of(prompt + tokens, "int32"),
            loss_mask=Array.of([0] * n + [1] * len(tokens), "uint8"),
            behavior_logprobs=Array.of([0.0] * n + logprobs, "float32"),
            version_runs=[VersionRun(n, version)],
            reward=reward,
            stop_reason="stop" if ended else "length",
        )


def snapshot(backend) -> Weights:
    return {name: tensor.clone() for name, tensor in backend.export()}


def train(overrides: list[str], lag: int) -> dict:
    """The whole run: rewards of the sampling policy, `lag` versions old, and of the last one on held-out problems."""
    torch.set_num_threads(1)
    config = load_config(Path("configs/quickstart.yaml"), [*overrides, f"staleness.max={lag}"], Config)
    sampler = Sampler(config)
    from common.json_lines import dataset_rows
    from learner.batch.batch import assemble
    from learner.batch.packing import build, plan
    from learner.loop.step_metrics import loss_figures
    from learner.loop.tasks import RowOrder
    from learner.loss.losses import policy_loss
    from learner.megatron.backend import MegatronBackend

    backend = MegatronBackend.of(config)
    rows = [json.loads(row) for _, row in dataset_rows(Path(config.tasks.dataset), "tasks.dataset")]
    order = RowOrder(len(rows), config.run.seed, shuffle=True).of_epoch(0)
    [path] = config.evaluation.datasets
    held_out = [json.loads(row) for _, row in dataset_rows(Path(path), "evaluation.datasets")]
    loss = policy_loss(config.learner.loss, config.rollout.max_tokens)
    size = config.learner.groups_per_step
    versions: deque[Weights] = deque([snapshot(backend)], maxlen=lag + 1)
    curve = []
    for step in range(config.run.steps):
        sampler.load(versions[0])
        problems = [rows[int(order[i % len(rows)])] for i in range(step * size, (step + 1) * size)]
        groups = sampler.groups(problems, step * size, max(0, step - lag))
        batch = assemble(groups, step, config)
        packed = build(batch.documents, plan(batch.documents, 1, config.learner.micro_batch_tokens)[0])
        result = backend.train_step(packed, loss, config.rollout.temperature, entropy=True)
        versions.append(snapshot(backend))
        figures = loss_figures(result)
        point = {"reward": batch.statistics.reward_mean, "staleness": batch.statistics.staleness_mean}
        point |= {"ratio_max": figures["ratio_max"], "drift": figures["drift_abs_mean"], "grad_norm": result.grad_norm}
        curve.append({name: round(float(value), 5) for name, value in point.items()})
    sampler.load(versions[-1])
    final = statistics.mean(s.reward for group in sampler.groups(held_out, 0, 0) for s in group.samples)
    return {"lag": lag, "seed": config.run.seed, "held_out": round(final, 4), "curve": curve}
