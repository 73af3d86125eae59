#!/usr/bin/env bash
# One rollout node of a job: launch/rollout.sh [CONFIG] [key=value ...] [--join ADDRESS] [--node-id ID]
exec "$(dirname "$0")/role.sh" rollout "$@"
