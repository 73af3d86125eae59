"""The counts of tests on a GPU are those of pytest's last lines, and say which a limit ended."""

from pathlib import Path

import pytest
from gpu_tests import counted, runs


@pytest.mark.parametrize(
    ("text", "counts", "cut"),
    [
        ("..s\n22 passed, 5 skipped in 70.76s (0:01:10)\n", (22, 0, 0, 5, 70.76), "no"),
        ("30 passed, 1 warning in 1.0s\n...\n1 failed, 18 passed in 83.81s\n", (18, 1, 0, 0, 83.81), "no"),
        ("Fatal Python error: Aborted\n1 skipped, 39 errors in 133.26s (0:02:13)\n", (0, 0, 39, 1, 133.26), "yes"),
        ("!!! KeyboardInterrupt !!!\nno tests ran in 108.46s (0:01:48)\n", (0, 0, 0, 0, 108.46), "yes"),
    ],
)
def test_counts_are_those_of_the_last_line(tmp_path: Path, text: str, counts: tuple[float, ...], cut: str) -> None:
    log = tmp_path / "lora1.log"
    log.write_text(text)
    found = counted(log)
    assert tuple(found[name] for name in ("passed", "failed", "errors", "skipped", "s")) == counts
    assert found["cut"] == cut


def test_a_log_without_an_end_is_an_error_and_a_row_names_its_commit(tmp_path: Path) -> None:
    (tmp_path / "call" / "f1").mkdir(parents=True)
    log = tmp_path / "call" / "f1" / "weights.log"
    log.write_text(".........\n9 passed, 49 deselected in 17.18s\n")
    (row,) = runs(["abc"], [tmp_path])
    assert (row["item"], row["commit"], row["passed"]) == ("weights", "abc", 9)
    log.write_text("...\n")
    with pytest.raises(ValueError, match=r"weights\.log: expected pytest's last line"):
        runs(["abc"], [tmp_path])
