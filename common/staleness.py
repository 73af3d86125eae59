"""The staleness rule: which tasks a node may lease, and which tokens are too old to train on.

Step s trains at policy version s and produces s + 1. A step consumes `groups_per_step` (B) groups.
Task n is due at step due(n) = floor((n - P) / B). P counts the tasks with lower serials that a later task replaced:
dead ones, and groups that a step filtered (docs/adr/0002, 0004). A node with version w may lease n only while
due(n) - w <= max (k), with P as it is at that moment.

Bound: groups are taken oldest first. Let n, not overtaken, be trained at step s. Each earlier step took B tasks with
lower serials, so s * B <= n - P for the P of that moment. P only grows, so s <= due(n) as it was at the lease. The
versions of n's tokens are >= w, so s - version <= due(n) - w <= k. At version s, tasks below B(s+k+1) + P may be
leased, and B*s + P of them are consumed or dead. So at most B(k+1) groups are outstanding. k = 0 is synchronous RL.
Tokens of overtaken groups that exceed k are found by `expired` and leave the loss.
"""

import numpy as np


def due_step(serial: int, groups_per_step: int, passed_before: int = 0) -> int:
    """Step at which task `serial` is due when `passed_before` tasks with lower serials have passed their place on."""
    return (serial - passed_before) // groups_per_step


def may_lease(serial: int, version: int, groups_per_step: int, max_staleness: int, passed_before: int = 0) -> bool:
    """Whether a node with policy `version` may lease task `serial`."""
    return due_step(serial, groups_per_step, passed_before) - version <= max_staleness


def window_end(version: int, groups_per_step: int, max_staleness: int, passed: int = 0) -> int:
    """One past the last serial that a node at `version` may lease when `passed` lower tasks have passed their place."""
    return groups_per_step * (version + max_staleness + 1) + passed


def expired(step: int, token_versions: np.ndarray, max_staleness: int) -> np.ndarray:
    """[T] bool, True where a token is older than `max_staleness` at `step`."""
    return step - token_versions > max_staleness
