"""Runs megatron_process.py, the unit tests that need Megatron, in a process of its own.

The CPU mode patches torch.Tensor and the import system for the life of a process, which no other test should see.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import LIMIT_S

INSIDE = Path(__file__).with_name("megatron_process.py")
ROOT = Path(__file__).resolve().parents[3]


def test_the_parts_that_need_megatron() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", str(INSIDE)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
