#!/usr/bin/env bash
# The rollout of a job: launch/rollout.sh [CONFIG] [key=value ...] [--join ADDRESS] [--node-id ID]
# Uses .venv-rollout when launch/setup.sh made it, else .venv, else the `slipstream` on PATH.
here="$(cd "$(dirname "$0")/.." && pwd)"
for venv in "$here/.venv-rollout" "$here/.venv"; do
  if [ -x "$venv/bin/slipstream" ]; then
    exec "$venv/bin/slipstream" rollout "$@"
  fi
done
command -v slipstream >/dev/null || { echo "no environment found; run launch/setup.sh first" >&2; exit 2; }
exec slipstream rollout "$@"
