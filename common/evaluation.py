"""Names of evaluated datasets and figures, as the metrics file has them."""

import re
from collections.abc import Sequence
from pathlib import PurePath


def dataset_names(datasets: Sequence[str]) -> list[str]:
    """A short name per dataset for files and metrics, for example addition-held_out; no two are equal."""
    names: list[str] = []
    for dataset in datasets:
        path = PurePath(dataset)
        name = re.sub(r"[^A-Za-z0-9_]+", "-", "-".join([path.parent.name, path.stem])).strip("-")
        names.append(f"{name}-{len(names) + 1}" if name in names else name)
    return names


def pass_ks(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples`."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})
