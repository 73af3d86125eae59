#!/usr/bin/env bash
# The learner of a job: launch/learner.sh CONFIG [key=value ...]
exec "$(dirname "$0")/role.sh" learner "$@"
