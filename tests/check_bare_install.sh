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
mkdir "$made/sources"  # only files that git knows: setuptools leaves others behind, which the next build would take
git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'for f; do [ ! -f "$f" ] || echo "$f"; done' sh \
  | tar -cf - -T - | tar -xf - -C "$made/sources"
sdist="$(build sdist "$made/sources")"
tar -xzf "$made/$sdist" -C "$made"
wheel="$(build wheel "$made/${sdist%.tar.gz}")"

"$python" -m venv --without-pip "$made/venv"
pip=("$python" -m pip --python "$made/venv/bin/python" --disable-pip-version-check)
"${pip[@]}" install -qq --no-compile --constraint requirements/cpu.txt "$made/$wheel"
"${pip[@]}" check
mkdir "$made/work"
checkout="$PWD"
cd "$made/work"  # far from the sources
env -u PYTHONPATH "$made/venv/bin/python" "$checkout/tests/check_bare_install.py" "$checkout"
