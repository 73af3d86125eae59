"""Logs of a role."""

import logging
import subprocess
import sys

import pytest

from common.process.logs import last_lines, log_path, setup_logging
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
