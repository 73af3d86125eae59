"""The download, the disk and the time that the first command costs: python bench/installation.py.

`pip download` fetches the pinned packages of requirements/cpu.txt. Then launch/setup.sh cpu installs them in a clone of
this checkout's commit, with empty caches and from that folder. So its seconds are without the download.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness


def mib(folder: Path) -> int:
    """Size of all files in a folder."""
    return round(sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20)


def install(folder: Path) -> dict[str, float]:
    wheels, clone = folder / "wheels", folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(harness.ROOT), str(clone)], check=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, "-r", str(clone / "requirements" / "cpu.txt")], check=True)
    caches = {"UV_CACHE_DIR": str(folder / "uv"), "PIP_CACHE_DIR": str(folder / "pip"), "PIP_FIND_LINKS": str(wheels)}
    began = time.monotonic()
    subprocess.run(["bash", "launch/setup.sh", "cpu"], cwd=clone, env={**os.environ, **caches}, check=True)
    return {"install_s": round(time.monotonic() - began), "download_mib": mib(wheels), "disk_mib": mib(clone)}


@harness.script(rounds=1)
def main(options: harness.Options) -> harness.Figures:
    runs = []
    for _ in range(options.rounds):
        folder = harness.scratch()
        runs.append(install(folder))
        shutil.rmtree(folder)
    return {"rounds": len(runs), "runs": runs}
