"""Which CPU cores each role gets on a small machine, so that generating and training do not push each other around."""

import os
from dataclasses import dataclass
from itertools import islice

SMALL_MACHINE_CORES = 16  # with more, the operating system has room to choose


@dataclass(frozen=True)
class CorePlan:
    """None means free to run anywhere."""

    learner: frozenset[int] | None
    nodes: tuple[frozenset[int] | None, ...]


def available_cores() -> list[int]:
    """Cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def plan_cores(cores: list[int], learner_threads: int, node_threads: list[int]) -> CorePlan:
    """Disjoint cores for the learner and each node's engine when all fit on a small machine, else none.

    Args:
        cores: the available ones.
        learner_threads: ranks x threads of the learner.
        node_threads: engine threads of each node.
    """
    needed = learner_threads + sum(node_threads)
    if not node_threads or needed > len(cores) or len(cores) > SMALL_MACHINE_CORES:
        return CorePlan(None, tuple(None for _ in node_threads))
    free = iter(cores)
    learner, *nodes = (frozenset(islice(free, count)) for count in (learner_threads, *node_threads))
    return CorePlan(learner, tuple(nodes))
