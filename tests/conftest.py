"""The order of the test files, and which of them `launch/test.sh fast` leaves out.

The workers of pytest-xdist take whole files in this order, so that no long file is left for the end.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
FOLDERS = ["integration", "faults", "contract", "property", "unit"]  # from long to short
FAST = {"contract", "property", "unit"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files by folder; mark what is slow by its folder."""
    for item in items:
        if _folder(item) not in FAST:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: FOLDERS.index(_folder(item)))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).parts[0]
