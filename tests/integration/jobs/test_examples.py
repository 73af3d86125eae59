"""One of the examples, the cheapest, as its README says; `bash launch/test.sh examples` runs all of them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rigs.processes import ROOT

CHEAPEST = "own-environment"


def test_an_example_does_what_its_readme_says(tmp_path: Path) -> None:
    words = [sys.executable, "bench/example_runs.py", "--dry", CHEAPEST]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{CHEAPEST}: ok" in done.stdout, done.stdout[:6000] + done.stderr[-4000:]
