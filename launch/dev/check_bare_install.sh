#!/usr/bin/env bash
# Checks a fresh environment with the base dependencies only, without torch, vllm and megatron.
#
# common, broker and launch must import there, and `slipstream --help` must take less than a second.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
python="${PYTHON:-.venv/bin/python}"
"$python" -m venv "$venv"
base="$("$python" - <<'PY'
import re, tomllib
from pathlib import Path
wanted = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
names = {re.split(r"[<>=\[ ]", d)[0].lower() for d in wanted} | {"markdown-it-py", "mdurl", "pygments"}  # the last three: rich's
pins = [line.strip() for line in Path("requirements/cpu.txt").read_text().splitlines() if "==" in line and line[0] != "#"]
print("\n".join(p for p in pins if p.split("==")[0].lower() in names | {"setuptools"}))
PY
)"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps $base
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
"$venv/bin/python" -m pip check
"$venv/bin/python" launch/dev/check_bare_install.py
