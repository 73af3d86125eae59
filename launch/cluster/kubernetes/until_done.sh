#!/usr/bin/env bash
# Runs a role as a pod of a Job: until_done.sh COMMAND ARGUMENTS...
# A drained role ends with 0, and the Job would take the pod as finished. So a drain by SIGTERM ends with 143 here.
"$@" & role=$!
trap 'told=yes; kill -TERM "$role"' TERM
until wait "$role"; code=$?; ! kill -0 "$role" 2>/dev/null; do :; done  # a signal ends `wait` early
[ -n "${told:-}" ] && [ "$code" -eq 0 ] && code=143
exit "$code"
