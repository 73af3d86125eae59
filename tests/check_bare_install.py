"""Run by check_bare_install.sh inside an environment that has only the base dependencies."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import timeit
from functools import partial
from pathlib import Path

LIMIT_S = 1.0
ATTEMPTS = 3
ABSENT = ("torch", "vllm", "megatron", "transformers", "matplotlib", "redis")
LEFT_OUT = ("common.weights", "launch.web", "launch.results.plots")  # they need extras


def main() -> int:
    """Exit code 1 with a reason when a check fails."""
    if present := [name for name in ABSENT if importlib.util.find_spec(name) is not None]:
        print(f"not a bare install: {', '.join(present)} can be imported")
        return 1
    imported = 0
    for package in ("common", "broker", "launch"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith(LEFT_OUT):
                importlib.import_module(module.name)
                imported += 1
    command = [Path(sys.executable).with_name("slipstream"), "--help"]
    run = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    best = min(timeit.repeat(run, number=1, repeat=ATTEMPTS))
    print(f"{imported} modules import without {', '.join(ABSENT)}; slipstream --help takes {best:.2f} s")
    if best > LIMIT_S:
        print(f"slipstream --help must take less than {LIMIT_S} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
