"""The task stream: a JSONL dataset, endlessly, in an order that follows from (run.seed, epoch) alone.

Task n is row `order(epoch)[n % rows]` of epoch `n // rows`. Nothing is remembered between calls, so the whole
state of the stream is the next serial.
"""

import functools
import hashlib
from pathlib import Path

import numpy as np

from common.json_lines import dataset_rows
from common.rollouts import Task


def shuffled(seed: int, epoch: int, count: int) -> np.ndarray:
    """[count] int64 permutation that depends on nothing but the arguments."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(count)


class TaskSource:
    """Tasks by serial number.

    Attributes:
        digest: identifies the dataset's rows; checkpoints have it, so that a resumed job notices another dataset.
    """

    def __init__(self, dataset: Path, seed: int, group_size: int, shuffle: bool = True) -> None:
        """Read and check the dataset; raises UsageError on a missing, empty or malformed file."""
        self._rows = [row for _, row in dataset_rows(dataset, "tasks.dataset")]
        self._seed = seed
        self._group_size = group_size
        self._shuffle = shuffle
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: shuffled(seed, epoch, len(self._rows)))
        self.digest = hashlib.sha256(b"\n".join(self._rows)).hexdigest()[:16]

    def __len__(self) -> int:
        """Rows of the dataset: tasks of one epoch."""
        return len(self._rows)

    def task(self, serial: int) -> Task:
        """Task number `serial`; the same for the same dataset, seed and serial, in any order of calls."""
        epoch, place = divmod(serial, len(self._rows))
        row = int(self._order(epoch)[place]) if self._shuffle else place
        seed = int(np.random.SeedSequence([self._seed, serial, 1]).generate_state(1)[0]) >> 1
        return Task(serial, self._rows[row], seed, self._group_size, epoch)
