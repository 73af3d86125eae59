#!/usr/bin/env bash
# The broker of a job: launch/broker.sh CONFIG [key=value ...]
# Uses .venv when launch/setup.sh made it, else .venv, else the `slipstream` on PATH.
here="$(cd "$(dirname "$0")/.." && pwd)"
for venv in "$here/.venv" "$here/.venv"; do
  if [ -x "$venv/bin/slipstream" ]; then
    exec "$venv/bin/slipstream" broker "$@"
  fi
done
command -v slipstream >/dev/null || { echo "no environment found; run launch/setup.sh first" >&2; exit 2; }
exec slipstream broker "$@"
