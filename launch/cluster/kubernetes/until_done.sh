#!/usr/bin/env bash
# Runs a role as a pod of a Job: until_done.sh COMMAND ARGUMENTS...
# A drained role ends with 0, and the Job would take the pod as finished. So a drain by SIGTERM ends with 143 here.
"$@" & role=$!
trap 'told=yes; kill -TERM "$role"' TERM
until wait "$role"; ! kill -0 "$role" 2>/dev/null; do :; done  # a signal ends `wait` early
wait "$role"; code=$?  # bash knows it, also when the role ended just after a `wait` that the signal had ended
[ -n "${told:-}" ] && [ "$code" -eq 0 ] && code=143
exit "$code"
