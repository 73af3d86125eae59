"""Age in policy versions of the KV cache over which each token was sampled; it follows from the sample alone.

A call of the model begins with keys and values of its own version only. Prefix caches are salted by version and
checked again when the request enters the engine. With `weights.kv_cache: keep` a call in flight keeps its keys and
values over a flip, so later tokens depend on older ones. With `recompute` they are computed again and every age is 0.
"""

import numpy as np


def cache_ages(versions: np.ndarray, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every token [T], (mean, largest) age of the entries that it was sampled over; 0 where nothing was sampled.

    The age of an entry is the version that sampled the token - the version that computed the entry. Entry p of a
    call is computed when token p + 1 is sampled, those of its prompt when its first token is. A request that the
    engine preempted and computed anew counts as if it had not been: the ages are upper bounds. `versions` has the
    version of every token; `sampled` is false for the first one, since nothing came before it.
    """
    mean, largest = np.zeros(len(versions)), np.zeros(len(versions), np.int64)
    edges = [*(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), len(versions)]
    for start, end in zip(edges[::2], edges[1::2], strict=False):  # a call may end with the sample
        own = versions[start:end]
        total = np.cumsum(own) + (start - 1) * own[0]  # over the `start` to `end` entries that the tokens attended to
        mean[start:end] = own - total / np.arange(start, end)
        largest[start:end] = own - np.minimum.accumulate(own)
    return np.maximum(mean, 0), largest
