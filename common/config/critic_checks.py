"""Checks of `learner.critic`: whether it fits the estimator, the model and the other keys."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.config.architecture import Architecture, first_class
from common.config.critic import BY_LENGTH
from common.config.schema import Config
from common.errors import Problem
from common.safetensors_header import headers

_KEY = "learner.critic"
CRITIC_SUFFIX = "ForSequenceClassification"  # end of the architecture's name in the config.json of a critic
SCORE = "score.weight"  # the head of transformers' model for sequence classification, [labels, hidden size]


def critic_problems(config: Config, model: Architecture | None) -> Iterator[Problem]:
    """Keys of the critic that contradict others or would be ignored, and `advantage: gae` without a critic."""
    critic = config.learner.critic
    for name, job in config.sources.items():
        own = name and config.tasks.sources[name].advantage is not None
        key = f"tasks.sources.{name}.advantage" if own else "learner.loss.advantage"
        estimator = job.learner.loss.advantage
        if estimator == "gae" and critic is None:
            hint = "its values come from a critic; docs/critic.md"
            yield Problem(key, "another estimator without learner.critic", estimator, hint)
        elif estimator != "gae" and critic is not None:
            hint = "no other estimator reads a critic's values"
            yield Problem(key, "gae with learner.critic", estimator, hint)
    if critic is None:
        return
    if critic.value_clip is not None and config.learner.updates == 1:
        hint = "learner.epochs and learner.minibatches are 1, and no value has moved when the only update begins"
        yield Problem(f"{_KEY}.value_clip", "unset with one update per step", hint=hint)
    if critic.lam == BY_LENGTH and critic.level == "turn":
        hint = "it follows from the number of tokens, and terms are turns"
        yield Problem(f"{_KEY}.lam", "a number with learner.critic.level: turn", hint=hint)
    if not config.learner.loss.trains_on_rewards:
        hint = "rewards do not train the policy, so nothing would read the advantages"
        yield Problem(_KEY, "unset with learner.loss.distillation.alone", "a section", hint)
    if model is not None and model.experts is not None:
        hint = "no critic with experts is proven"
        yield Problem(_KEY, "unset for a model with experts", "a section", hint)


def warmup_problems(config: Config) -> Iterator[Problem]:
    """A warm-up as long as the job. The learner alone has the config of a replay, which may end in the warm-up."""
    if config.learner.critic is not None and config.learner.critic.warmup_steps >= config.run.steps:
        hint = "the policy would never train"
        yield Problem(f"{_KEY}.warmup_steps", f"less than run.steps ({config.run.steps})", hint=hint)


def is_critic(folder: Path) -> bool:
    """Whether a folder has a value model, as a job writes it into RUN/critic. Raises OSError and ValueError."""
    document = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, object])
    return (first_class(document.get("architectures")) or "").endswith(CRITIC_SUFFIX)


def labels_of(folder: Path) -> int:
    """Rows of the head in a critic's safetensors files; 0 where no file has one. Raises OSError and ValueError."""
    return next((sum(told[SCORE]["shape"][:1]) for _, _, told in headers(folder) if SCORE in told), 0)
