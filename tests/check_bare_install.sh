#!/usr/bin/env bash
# Checks a wheel in a fresh environment with the base dependencies only, without torch, vllm and megatron.
#
# The wheel is built from an sdist, as for an index. tests/check_bare_install.py says what must work there.
set -euo pipefail
cd "$(dirname "$0")/.."

made="$(mktemp -d)"
trap 'rm -rf "$made"' EXIT
python="$(realpath -s "${PYTHON:-.venv/bin/python}")"
build() {  # build KIND FOLDER: the file that setuptools makes of the sources in FOLDER, as `python -m build` asks for it
  (cd "$2" && "$python" -c "from setuptools import build_meta as b; print(b.build_$1('$made'))" | tail -n 1)
}
mkdir "$made/sources"  # what git knows, because setuptools leaves files behind that the next build would take
git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for f; do [ ! -f "$f" ] || echo "$f"; done' sh \
  | tar -cf - -T - | tar -xf - -C "$made/sources"
sdist="$(build sdist "$made/sources")"
tar -xzf "$made/$sdist" -C "$made"
wheel="$(build wheel "$made/${sdist%.tar.gz}")"

"$python" -m venv "$made/venv"
"$made/venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint requirements/cpu.txt "$made/$wheel"
"$made/venv/bin/python" -m pip check
mkdir "$made/work"
checkout="$PWD"
cd "$made/work"  # far from the sources
env -u PYTHONPATH "$made/venv/bin/python" "$checkout/tests/check_bare_install.py" "$checkout"
