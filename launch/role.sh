#!/usr/bin/env bash
# One role of a job in the environment that has its packages: launch/role.sh broker|learner|rollout ARGUMENTS
# broker.sh, learner.sh and rollout.sh call it. It takes the first environment of launch/setup.sh that exists:
# .venv-learner for the learner, .venv-rollout for a node, then .venv, then the `slipstream` on PATH.
# The broker needs only base packages, so any of the three environments will do.
here="$(cd "$(dirname "$0")/.." && pwd)"
case "${1:-}" in
  broker) environments=".venv .venv-learner .venv-rollout" ;;
  learner | rollout) environments=".venv-$1 .venv" ;;
  *) echo "role.sh: expected broker, learner or rollout, found '${1:-}'" >&2; exit 2 ;;
esac
for name in $environments; do
  [ -x "$here/$name/bin/slipstream" ] && exec "$here/$name/bin/slipstream" "$@"
done
command -v slipstream >/dev/null || { echo "no environment found; run launch/setup.sh first" >&2; exit 2; }
exec slipstream "$@"
