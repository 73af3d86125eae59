#!/usr/bin/env bash
# The checks of CI: launch/test.sh [fast] [pytest arguments], or launch/test.sh examples [NAME ...]
#   (nothing)  lint, types, import contracts, words, the bare base install, every test, and some engines again with vLLM's
#              AVX2 library; every architecture is tried in the environment with the learner's pins alone
#   gpu        `slipstream selftest` with this machine's environments; nothing is installed
#   examples   every example of examples/, or those named, as its README says; figures go to bench/results/examples.json
#   fast       lint, types, import contracts, words and the tests that are not marked slow; at most 90 s after set-up
# Arguments choose other tests; the checks still run. But for gpu, the environment is set up first.
set -euo pipefail
cd "$(dirname "$0")/.."

step() {  # step TITLE COMMAND...
  local title="$1" begun=$SECONDS
  shift
  printf '\n== %s\n' "$title"
  "$@" || { printf '== FAILED after %d s: %s\n' $((SECONDS - begun)) "$title" >&2; exit 1; }
  printf '== ok, %d s: %s\n' $((SECONDS - begun)) "$title"
}

install_chromium() {  # the browser that draws the page in tests/integration/test_web_page.py
  command -v chromium || command -v chromium-browser || command -v google-chrome && return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get; then
    echo "the tests of the page need Chromium: install Debian's package chromium" >&2
    return 1
  fi
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends -y chromium
}

if [ "${1:-}" = gpu ]; then
  shift
  for python in .venv-learner/bin/python .venv/bin/python python3; do
    command -v "$python" >/dev/null && exec "$python" -m launch.cli selftest "$@"
  done
fi

if [ "${1:-}" = examples ]; then
  shift
  bash launch/setup.sh cpu
  exec .venv/bin/python bench/example_runs.py "$@"
fi

fast=""
[ "${1:-}" != fast ] || { fast=yes; shift; }

meanwhile=() logs=() failed=""
trap 'kill 0' INT  # the shell keeps it from what runs in the background

behind() {  # behind FUNCTION: runs it while other steps run; `joined` shows what it wrote
  logs+=("$(mktemp)")
  "$1" >"${logs[-1]}" 2>&1 &
  meanwhile+=($!)
}

joined() {  # waits for everything behind; ends with an error when a step has failed
  local i
  for i in "${!meanwhile[@]}"; do
    wait "${meanwhile[$i]}" || failed=yes
    cat "${logs[$i]}"
    rm "${logs[$i]}"
  done
  meanwhile=() logs=()
  [ -z "$failed" ] || exit 1
}

other_environments() {
  if [ -z "${SLIPSTREAM_VERIFIERS_PYTHON:-}" ] || [ -z "${SLIPSTREAM_OPENENV_PYTHON:-}" ] || [ -z "${SLIPSTREAM_SINKS_PYTHON:-}" ]; then
    step "environment of verifiers, OpenEnv, clients and trackers" bash launch/setup.sh adapters
  fi
  [ -n "$fast" ] || step "environment with the learner's pins" bash launch/setup.sh learner --cpu
}

unset PYTHONDONTWRITEBYTECODE  # pytest rewrites every assertion again where it may not keep what it compiled
behind other_environments
(step "environment" bash launch/setup.sh cpu) || failed=yes
if [ -z "$fast$failed$*" ]; then  # once here, beside the other environments, so that not every worker does it
  step "pytest's compiled tests" bash -c '.venv/bin/python -m pytest --collect-only -qq >/dev/null || true'
fi
joined
[ -n "$fast" ] || step "Chromium" install_chromium
export SLIPSTREAM_LEARNER_PYTHON="$PWD/.venv-learner-cpu/bin/python"
export SLIPSTREAM_VERIFIERS_PYTHON="${SLIPSTREAM_VERIFIERS_PYTHON:-$PWD/.venv-adapters/bin/python}"
export SLIPSTREAM_OPENENV_PYTHON="${SLIPSTREAM_OPENENV_PYTHON:-$PWD/.venv-adapters/bin/python}"
export SLIPSTREAM_SINKS_PYTHON="${SLIPSTREAM_SINKS_PYTHON:-$PWD/.venv-adapters/bin/python}"
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1
begun=$SECONDS
step "ruff check" ruff check .
step "ruff format" ruff format --check .

# A file stays on one worker. Tests wait often, for deadlines and for processes that start, so there are more workers than
# the two cores that they are made for.
pytest=(python -m pytest -rs --durations=40 -n 3 --dist loadfile --no-loadscope-reorder)

checks() {
  step "pyright" pyright
  step "import contracts" lint-imports
  step "plain words" python -m tests.check_words
  step "hadolint" hadolint launch/cluster/Dockerfile
}

bare_install() { step "bare base install" bash tests/check_bare_install.sh; }

cluster() { step "tests on a cluster of hosts" "${pytest[@]}" -n 2 tests/cluster; }

other_library() {
  grep -qw avx512f /proc/cpuinfo || return 0
  step "engines with vLLM's library for CPUs without AVX-512" nice -n 5 env PYTHONPATH="$PWD/tests/avx2" python -m pytest -rs \
    tests/integration/test_engine_{flips,tensor_parallel}.py -k "not (Qwen2 or Llama or Mistral or Mixtral or Glm4Moe or AMX or plain or copies)"
}

architectures=tests/integration/megatron/test_architectures.py
other_pins() {
  step "every architecture with the learner's pins" nice -n 5 "$SLIPSTREAM_LEARNER_PYTHON" -m pytest -q "$architectures"
}

cluster_and_variants() {  # one after another; the later ones run also when one fails
  local failed=0
  (cluster) || failed=1
  (other_library) || failed=1
  (other_pins) || failed=1
  return $failed
}

if [ -n "$fast" ]; then
  behind checks
  (step "fast tests" "${pytest[@]}" -m "not slow" tests/unit tests/property tests/contract "$@") || failed=yes
elif [ $# -gt 0 ]; then
  behind checks
  (step "chosen tests" "${pytest[@]}" "$@") || failed=yes
else
  behind checks
  behind bare_install
  # Hosts wait most of the time, for machines that fall silent. Other tests have a lower priority, so that they do not
  # delay the clocks of a cluster.
  behind cluster_and_variants
  (step "all tests but those on a cluster" nice -n 5 "${pytest[@]}" -m "not cluster" --ignore="$architectures") || failed=yes
fi
joined
printf '\n== all checks passed in %d s after set-up\n' $((SECONDS - begun))
