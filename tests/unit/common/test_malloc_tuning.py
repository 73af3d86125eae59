"""The allocator's setting, seen through page faults of a process that frees and takes large blocks."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from common.process.malloc_tuning import keep_freed_memory
if sys.argv[1] != "default" and not keep_freed_memory(one_heap=sys.argv[1] == "one_heap"):
    sys.exit("not taken")
def turn():
    blocks = [bytes(600_000) for _ in range(20)]
    blocks.clear()
turn(); turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setting: str) -> int:
    command = [sys.executable, "-c", FAULTS, setting]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
@pytest.mark.parametrize("setting", ["kept", "one_heap"])
def test_freed_memory_is_used_again_without_page_faults(setting: str) -> None:
    default, kept = faults("default"), faults(setting)
    assert kept < 2000 and 5 * kept < default, f"{kept} page faults, {default} by default"
