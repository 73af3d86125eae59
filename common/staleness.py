"""The staleness rule: which tasks a node may lease, and which tokens are too old to train on.

Step s trains at policy version s and produces s + 1. A step consumes `groups_per_step` (B) groups.
Task n is due at step due(n) = floor((n - P) / B). P counts the tasks with lower serials that a later task replaced:
dead ones, and groups that a step filtered (docs/decisions.md). A node with version w may lease n only while
due(n) - w <= max (k), with P as it is at that moment. Where task 0 is due at a later step than 0, because a learner
resumed with a new broker, steps and versions count from there.

Bound: groups are taken oldest first. Let n, not overtaken, be trained at step s. Each earlier step took B tasks with
lower serials, so s * B <= n - P for the P of that moment. P only grows, so s <= due(n) as it was at the lease. The
versions of n's tokens are >= w, so s - version <= due(n) - w <= k. At version s, tasks below B(s+k+1) + P may be
leased, and B*s + P of them are consumed or dead. So at most B(k+1) groups are outstanding. k = 0 is synchronous RL.
Tokens of overtaken groups that exceed k are found by `expired` and leave the loss.
"""

import msgspec
import numpy as np


class Window(msgspec.Struct, frozen=True):
    """The rule with everything that it depends on; admission and every text about it use this."""

    groups_per_step: int
    max_staleness: int
    first_step: int  # at which task 0 is due
    passed_gone: int  # tasks before those in `passed` that have passed their place on
    passed: tuple[int, ...]  # sorted serials of further ones

    def first_due(self, step: int) -> int:
        """Tasks with lower serials are due before `step`, all others at `step` or later."""
        serial = self.groups_per_step * (step - self.first_step) + self.passed_gone
        for passed in self.passed:
            if passed >= serial:
                break
            serial += 1
        return serial

    def end(self, version: int) -> int:
        """One past the last serial that a node at `version` may lease."""
        return self.first_due(version + self.max_staleness + 1)


def expired(step: int, token_versions: np.ndarray, max_staleness: int) -> np.ndarray:
    """[T] bool, True where a token is older than `max_staleness` at `step`."""
    return step - token_versions > max_staleness
