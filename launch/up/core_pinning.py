"""Which CPU cores each role gets on a small machine, so that generating and training do not push each other around."""

import os
from itertools import islice

SMALL_MACHINE_CORES = 16  # with more, the operating system has room to choose
Cores = frozenset[int] | None  # None: free to run anywhere


def available_cores() -> list[int]:
    """Cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def plan_cores(cores: list[int], learner_threads: int, node_threads: list[int]) -> list[Cores]:
    """Disjoint cores for the threads of all ranks, then of each node; None each unless all fit on a small machine."""
    wanted = [learner_threads, *node_threads]
    if not node_threads or sum(wanted) > len(cores) or len(cores) > SMALL_MACHINE_CORES:
        return [None] * len(wanted)
    free = iter(cores)
    return [frozenset(islice(free, count)) for count in wanted]
