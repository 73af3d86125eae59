"""launch/follow.sh: what launch/setup.sh says while uv or pip works, from lines that both have written."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import ROOT

UV = """Resolved 5 packages in 216ms
Downloading numpy (16.1MiB)
Downloading pyarrow (52.5MiB)
Downloading torch (1.5GiB)
Downloading msgspec (211.4KiB)
 Downloaded msgspec
 Downloaded numpy
 Downloaded pyarrow
 Downloaded torch
Prepared 5 packages in 4.18s
Installed 5 packages in 31ms
 + msgspec==0.22.0
"""
PIP = """Looking in indexes: https://pypi.org/simple
Processing /opt/pypi/files/numpy-2.3.5-cp311-cp311-manylinux_2_28_x86_64.whl (from -r req.txt (line 1))
Collecting regex==2026.11.15 (from -r req.txt (line 3))
  Downloading regex-2026.11.15-cp311-cp311-manylinux2014_x86_64.whl (806 kB)
Installing collected packages: regex, pyarrow, numpy, msgspec
  Attempting uninstall: numpy
"""
# Every line comes ten seconds after the one before, and with the sixth a package is there.
CLOCK = """
. "$1/launch/follow.sh"
unset SECONDS; SECONDS=0
read() { SECONDS=$((SECONDS + 10)); [ $SECONDS != 60 ] || mkdir "$site/numpy-2.3.5.dist-info"; builtin read "$@"; }
follow_every_s="$5"
follow "$2" "$4" "$3"
"""


def command(folder: Path, packages: int, every_s: int) -> list[str]:
    (folder / "pip-1.0.dist-info").mkdir()
    return ["bash", "-c", CLOCK, "bash", *map(str, (ROOT, folder / "log", folder, packages, every_s))]


def test_a_log_says_every_15_s_how_much_of_the_downloads_has_come_and_what_is_left(tmp_path: Path) -> None:
    said = subprocess.run(command(tmp_path, 5, 15), input=UV, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "setup: [ 20s] 0 of 16 MiB downloaded",
        "setup: [ 40s] 0 of 1604 MiB downloaded",
        "setup: [ 60s] 0 of 1604 MiB downloaded",
        "setup: [ 80s] 68 of 1604 MiB downloaded, about 1807 s left",
        "setup: [100s] Prepared 5 packages in 4.18s",
        "setup: [120s]  + msgspec==0.22.0",
    ]
    assert (tmp_path / "log").read_text() == UV


def test_pip_fetches_so_many_of_the_packages_and_then_installs_what_it_has_collected(tmp_path: Path) -> None:
    said = subprocess.run(command(tmp_path, 8, 10), input=PIP, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "setup: [ 10s] Looking in indexes: https://pypi.org/simple",
        "setup: [ 20s] 0 of 8 packages fetched",
        "setup: [ 30s] 1 of 8 packages fetched, about 210 s left",
        "setup: [ 40s] 1 of 8 packages fetched, about 280 s left",
        "setup: [ 50s] 0 of 4 packages installed",
        "setup: [ 60s] 1 of 4 packages installed, about 30 s left",
    ]


def test_a_terminal_has_one_line_which_is_gone_at_the_end(tmp_path: Path) -> None:
    mine, theirs = pty.openpty()
    subprocess.run(command(tmp_path, 5, 15), input=UV, text=True, stdout=theirs, check=True)
    os.close(theirs)
    shown = os.read(mine, 1 << 16).decode()
    os.close(mine)
    assert "\n" not in shown and "\r\033[Ksetup: [ 80s] 68 of 1604 MiB downloaded, about 1807 s left\r" in shown
    assert shown.endswith("\r\033[K")


@pytest.mark.parametrize(("words", "code"), [(["--no-index", "no-such-package"], 1), (["--version"], 0)])
def test_the_code_is_that_of_pip_and_the_log_has_its_error(tmp_path: Path, words: list[str], code: int) -> None:
    script = 'set -o pipefail; . "$1/launch/follow.sh"; shift; log="$1"; shift; "$@" 2>&1 | follow "$log" 1 .'
    pip = [sys.executable, "-m", "pip", *(["install"] if code else []), *words]
    log = tmp_path / "pip.log"
    done = subprocess.run(["bash", "-c", script, "bash", str(ROOT), str(log), *pip], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert ("ERROR: No matching distribution found for no-such-package" in log.read_text()) == bool(code)
