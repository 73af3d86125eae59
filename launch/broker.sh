#!/usr/bin/env bash
# The broker of a job: launch/broker.sh CONFIG [key=value ...]
exec "$(dirname "$0")/role.sh" broker "$@"
