"""Rewards: (completion, row) -> number. `row` is a line of the dataset."""

import re


def last_number(completion, row):
    """1 when the last number of the completion is the one behind #### in the row's answer."""
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == row["answer"].rpartition("#### ")[2])
