"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without signal are left out, others take their place.

A group whose rewards are all equal has zero advantages. With `learner.dynamic_sampling` a step trains on none of them
and takes further groups instead: at most MOST_TAKEN times as many as it trains on. The page docs/decisions.md says how
admission allows for that. The decision depends on the groups alone, so a replay decides the same.
"""

from common.rollouts import Group

MOST_TAKEN = 3  # times learner.groups_per_step that one step looks at


def carries_signal(group: Group) -> bool:
    """Whether two samples that did not fail have different rewards."""
    rewards = [sample.reward for sample in group.samples if sample.error is None]
    return any(reward != rewards[0] for reward in rewards)


def most_replaced(groups_per_step: int) -> int:
    """How many filtered groups of one step others are taken for."""
    return (MOST_TAKEN - 1) * groups_per_step
