"""Age in policy versions of the KV cache over which each token was sampled; it follows from the sample alone.

A call of the model begins with keys and values of its own version only. Prefix caches are salted by version and
checked again when the request enters the engine. With `weights.kv_cache: keep` a call in flight keeps its keys and
values over a flip, so later tokens depend on older ones. With `recompute` they are computed again and every age is 0.
"""

import numpy as np
from numpy.typing import NDArray

from common.rollouts import Sample


def cache_ages(sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """For every token [T], (mean, largest) age of the entries that it was sampled over; 0 where nothing was sampled.

    The age of an entry is the version that sampled the token - the version that computed the entry. Entry p of a
    call is computed when token p + 1 is sampled, those of its prompt when its first token is. A request that the
    engine preempted and computed anew counts as if it had not been: the ages are upper bounds.
    """
    versions = sample.token_versions()
    mean, largest = np.zeros(len(versions)), np.zeros(len(versions), np.int64)
    if len(sample.version_runs) < 2:
        return mean, largest
    sampled = np.concatenate([[False], sample.loss_mask.numpy() > 0, [False]])
    starts, ends = np.flatnonzero(~sampled[:-1] & sampled[1:]), np.flatnonzero(sampled[:-1] & ~sampled[1:])
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        own = versions[start:end]
        entries = np.arange(start, end, dtype=np.int64)  # that each token of the call attended to
        total = start * own[0] + np.cumsum(own) - own[0]
        mean[start:end] = np.maximum(own - total / np.maximum(entries, 1), 0)
        largest[start:end] = np.maximum(own - np.minimum.accumulate(own), 0)
    if len(mean) and sampled[1]:
        mean[0] = 0  # nothing came before it
    return mean, largest
