"""Logs of a role."""

import logging
import subprocess
import sys

import pytest

from common.process.logs import last_lines, log_path, setup_logging, visible
from tests.rigs.waiting import LIMIT_S


@pytest.fixture
def root():
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    logger.handlers = []
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers = before
    logger.setLevel(level)
    logging.captureWarnings(False)


def test_a_record_goes_once_to_the_file_and_to_stderr_with_its_role_and_a_second_setup_replaces_the_first(
    root, tmp_path, capsys
):
    setup_logging("rollout", "node-0", tmp_path / "logs", "error")
    setup_logging("rollout", "node-0", tmp_path / "logs", "info")
    logging.getLogger("some.module").info("hello %d", 7)
    logging.getLogger("some.module").debug("not this")
    text = log_path(tmp_path / "logs", "rollout", "node-0").read_text()
    assert text.count("Z rollout-node-0 INFO    some.module: hello 7\n") == 1
    assert "not this" not in text
    assert capsys.readouterr().err == text


def test_a_message_forges_no_record_and_commands_no_terminal(root, tmp_path, capsys):
    setup_logging("rollout", "node-0", tmp_path)
    forged = "2026-01-01T00:00:00Z broker-0 INFO    broker: all is well"
    hostile = "\n".join(["bad", forged, "\x1b]52;c;cm0=\x07\tend"]) + "".join(
        f"{c}{forged}" for c in "\r\x0b\x85\u2028"
    )
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("some.module").exception("task %d failed: %s", 3, hostile)
    text = log_path(tmp_path, "rollout", "node-0").read_text()
    first, *further = text.splitlines()
    assert first.endswith("Z rollout-node-0 ERROR   some.module: task 3 failed: bad")
    assert further and all(line.startswith("    ") for line in further)
    assert further[0] == f"    {forged}" and r"\x1b]52;c;cm0=\x07" + "\tend" in further[1]
    assert "    Traceback (most recent call last):" in further and "    ValueError: bad" in further
    assert all(line.replace("\t", " ").isprintable() for line in (first, *further))
    assert capsys.readouterr().err == text


def test_spaces_of_every_script_stay_and_separators_and_directions_are_escaped():
    spaces = "「東京\u3000都」 10\u00a0000\u202fkm"
    assert visible(spaces) == spaces
    assert visible(spaces + "\u2028\u2029\u202e\u2066\u200b\x1b") == spaces + r"\u2028\u2029\u202e\u2066\u200b\x1b"


def test_redirected_stderr_is_not_written_twice(tmp_path):
    code = (
        "import logging, pathlib; from common.process.logs import setup_logging;"
        f"setup_logging('learner', '0', pathlib.Path({str(tmp_path)!r})); logging.getLogger('x').info('once')"
    )
    path = log_path(tmp_path, "learner", "0")
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=True, timeout=LIMIT_S)
    assert path.read_text().count("once") == 1


def test_last_lines_of_a_log(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path, 3) == []
    path.write_text("".join(f"line {i}\n\n" for i in range(1000)))
    assert last_lines(path, 2) == ["line 998", "line 999"]
    assert last_lines(path, 5, max_bytes=12) == ["line 999"]
