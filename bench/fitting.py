"""Least squares for times."""

import numpy as np


def fit_positive(rows: list[list[float]], measured: list[float]) -> list[float]:
    """Factors of the columns, none negative, by least squares of the relative errors.

    A column that would be negative is left out, the most negative one first.
    """
    design = np.array(rows, dtype=float) / np.array(measured)[:, None]
    columns = list(range(design.shape[1]))
    factors = np.zeros(design.shape[1])
    while columns:
        scale = np.abs(design[:, columns]).max(axis=0)
        found = np.linalg.lstsq(design[:, columns] / scale, np.ones(len(design)), rcond=None)[0]
        if found.min() >= 0:
            factors[columns] = found / scale
            break
        del columns[int(found.argmin())]
    return [float(factor) for factor in factors]
