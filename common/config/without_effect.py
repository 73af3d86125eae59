"""Keys that a config may have though they do nothing in its run."""

import math
from collections.abc import Iterator

from common.config.schema import BaseConfig
from common.config.tasks import CurriculumConfig
from common.metrics import NEEDING


def absent_metrics(config: BaseConfig) -> dict[str, str]:
    """The metrics of a step that this run does not measure, and the key that each of them needs."""
    job = config.rl
    given = {"evaluation.every": job is not None or config.evaluation.every > 0}
    if job is not None:
        given["learner.loss.kl_coefficient"] = job.measures_kl
        given["learner.loss.distillation"] = job.learner.loss.distillation is not None
        given["learner.critic"] = job.learner.critic is not None
        given["learner.moe.replay_routing"] = job.learner.moe.replay_routing
        given["rollout.concurrency: auto"] = job.rollout.concurrency == "auto"
    return {name: key for key, names in NEEDING.items() if not given.get(key, True) for name in names}


def without_effect(config: BaseConfig) -> Iterator[str]:
    """Sentences about keys that do nothing in this run. A sweep and a continued run may have them.

    Only what launches or reviews a job says them: a role is silent.
    """
    learner, absent = config.learner, absent_metrics(config)
    optimizers = {"learner.optimizer": learner.optimizer}
    if learner.value_model is not None:
        optimizers["learner.critic.optimizer"] = learner.value_model.optimizer
    for at, optimizer in optimizers.items():
        for name in ("decay_steps", "min_lr_fraction") if optimizer.schedule == "constant" else ():
            if getattr(optimizer, name):
                yield f"{at}.{name} has no effect with {at}.schedule: constant."
    best = (learner.checkpoint.keep_best or "").removeprefix("-")
    if key := absent.get(best):
        yield f"learner.checkpoint.keep_best has no effect: this run does not measure {best}, which needs {key}."
    if (job := config.rl) is None:
        return
    every, steps = job.evaluation.every, config.run.steps
    judges = best.startswith("evaluation/") and 0 < every <= steps  # a trial of a few steps evaluates nothing
    if judges and steps % every and math.lcm(every, learner.checkpoint.every) > steps:  # the last one is a checkpoint
        given = (
            f"evaluation.every ({every}), learner.checkpoint.every ({learner.checkpoint.every}), run.steps ({steps})"
        )
        yield f"learner.checkpoint.keep_best has no effect: with {given} no evaluated version has a checkpoint."
    unset, curriculum = CurriculumConfig(), job.tasks.curriculum
    for name in unset.__struct_fields__ if curriculum.rule == "none" else ():
        if getattr(curriculum, name) != getattr(unset, name):
            yield f"tasks.curriculum.{name} has no effect with tasks.curriculum.rule: none."
    for number, rule in enumerate(job.watch):
        key = absent.get(rule.metric)
        if not every and rule.metric.startswith("evaluation/"):
            key = "evaluation.every"
        if key:
            yield f"watch[{number}] has no effect: this run does not measure {rule.metric}, which needs {key}."
    judged = all(part.reward is not None for part in job.tasks.parts.values())  # an environment may vary by its seed
    if job.evaluation.temperature == 0 and job.evaluation.samples > 1 and judged:
        yield "evaluation.samples has no effect with evaluation.temperature: 0: all greedy answers are the same."
