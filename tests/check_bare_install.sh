#!/usr/bin/env bash
# Checks a fresh environment with the base dependencies only, without torch, vllm and megatron.
#
# common, broker and launch must import there, and `slipstream --help` must take less than a second.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
python="${PYTHON:-.venv/bin/python}"
"$python" -m venv "$venv"
install=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint requirements/cpu.txt)
"${install[@]}" setuptools
"${install[@]}" --no-build-isolation --editable .
"$venv/bin/python" -m pip check
"$venv/bin/python" tests/check_bare_install.py
