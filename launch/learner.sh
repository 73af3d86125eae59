#!/usr/bin/env bash
# The learner of a job: launch/learner.sh CONFIG [key=value ...]
# Uses .venv-learner when launch/setup.sh made it, else .venv, else the `slipstream` on PATH.
here="$(cd "$(dirname "$0")/.." && pwd)"
for venv in "$here/.venv-learner" "$here/.venv"; do
  if [ -x "$venv/bin/slipstream" ]; then
    exec "$venv/bin/slipstream" learner "$@"
  fi
done
command -v slipstream >/dev/null || { echo "no environment found; run launch/setup.sh first" >&2; exit 2; }
exec slipstream learner "$@"
