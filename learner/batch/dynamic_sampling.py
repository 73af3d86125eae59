"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without signal are left out, others take their place.

A group without signal has zero advantages. With `learner.dynamic_sampling` a step trains on none of them and takes
further groups instead: at most MOST_TAKEN times as many as it trains on. The page docs/decisions.md says how
admission allows for that. The decision depends on the groups alone, so a replay decides the same.
"""

from common.config.loss import DEFAULT_K
from common.config.schema import Config
from common.evaluation import succeeds
from common.rollouts import Group

MOST_TAKEN = 3  # times learner.groups_per_step that one step looks at


def carries_signal(group: Group, job: Config) -> bool:
    """Whether two samples that did not fail have different rewards; `job`: the group's among Config.sources.

    With pass_at_k: whether one of them succeeds and a draw of k does not always succeed, since k of them do not.
    """
    rewards = [sample.reward for sample in group.samples if sample.error is None]
    loss = job.learner.loss
    if loss.advantage == "pass_at_k":
        successes = sum(succeeds(reward, job.tasks.success) for reward in rewards)
        return successes > 0 and len(rewards) - successes >= int(loss.advantage_options.get("k", DEFAULT_K))
    return any(reward != rewards[0] for reward in rewards)


def most_replaced(groups_per_step: int) -> int:
    """How many filtered groups of one step others are taken for."""
    return (MOST_TAKEN - 1) * groups_per_step
