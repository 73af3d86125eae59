#!/usr/bin/env bash
# Everything that CI runs: launch/test.sh [pytest arguments]   (arguments replace the whole test suite, the checks still run)
set -euo pipefail
cd "$(dirname "$0")/.."

step() {  # step TITLE COMMAND...
  local title="$1" begun=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  "$@" || { printf '== FAILED after %d s: %s\n' $((SECONDS - begun)) "$title" >&2; exit 1; }
  printf '== ok, %d s: %s\n' $((SECONDS - begun)) "$title"
}

step "environment" bash launch/setup.sh cpu
if [ -z "${SLIPSTREAM_VERIFIERS_PYTHON:-}" ] || [ -z "${SLIPSTREAM_OPENENV_PYTHON:-}" ]; then
  step "environment of verifiers and OpenEnv" bash launch/setup.sh adapters
fi
export SLIPSTREAM_VERIFIERS_PYTHON="${SLIPSTREAM_VERIFIERS_PYTHON:-$PWD/.venv-adapters/bin/python}"
export SLIPSTREAM_OPENENV_PYTHON="${SLIPSTREAM_OPENENV_PYTHON:-$PWD/.venv-adapters/bin/python}"
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "pyright" pyright
step "import contracts" lint-imports
step "plain words" python -m launch.dev.check_words
step "bare base install" bash launch/dev/check_bare_install.sh
step "tests" python -m pytest -rs --durations=15 "$@"
printf '\n== all checks passed in %d s\n' "$SECONDS"
