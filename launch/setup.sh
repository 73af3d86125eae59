#!/usr/bin/env bash
# Build the Python environment of one role from pinned versions: launch/setup.sh cpu|learner|rollout|adapters [--cpu] [--venv DIR]
#   cpu      learner, fleet, report and tests together, for machines without a GPU; the default environment .venv
#   learner  Megatron with Transformer Engine for CUDA machines; .venv-learner. With --cpu the same versions, but torch's CPU
#            build and nothing that needs CUDA, so that tests can run them; .venv-learner-cpu
#   rollout  vLLM for CUDA machines; .venv-rollout
#   adapters verifiers, reasoning-gym, OpenEnv, clients of agents and the trackers of `slipstream sinks`; .venv-adapters,
#            named by tasks.limits.python
# Running it again is free: it does nothing while requirements and sources of the package list are unchanged.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/follow.sh

usage() { sed -n '2,9s/^# \{0,1\}//p' launch/setup.sh; }
fail() { echo "setup: $*" >&2; exit 1; }
say() { printf 'setup: [%3ds] %s\n' "$SECONDS" "$*"; }

role="" venv="" cpu=""
while [ $# -gt 0 ]; do
  case "$1" in
    cpu|learner|rollout|adapters) role="$1" ;;
    --cpu) cpu=yes ;;
    --venv) [ $# -ge 2 ] || { echo "setup: --venv needs a folder" >&2; exit 2; }; venv="$2"; shift ;;
    -h|--help) usage; exit 0 ;;
    *) echo "setup: unknown argument '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
[ -n "$role" ] || { echo "setup: which role? cpu, learner, rollout or adapters" >&2; usage >&2; exit 2; }
[ -z "$cpu" ] || [ "$role" = learner ] || { echo "setup: --cpu goes with the role learner only" >&2; exit 2; }
kind="$role${cpu:+-cpu}"
case "$kind" in
  cpu)
    need_gib=8
    modules="torch vllm.v1.engine.async_llm vllm.v1.worker.cpu_worker transformers transformers.models.qwen3"
    modules="$modules megatron.core yaml zmq msgspec rich matplotlib" ;;
  learner-cpu) need_gib=3; modules="torch transformers megatron.core zmq msgspec yaml" ;;
  learner) need_gib=25; modules="torch transformers megatron.core transformer_engine.pytorch zmq msgspec" ;;
  rollout) need_gib=25; modules="torch vllm transformers zmq msgspec" ;;
  adapters)
    need_gib=2
    modules="verifiers.v1 reasoning_gym openenv.core.env_server.http_server uvicorn mcp"
    modules="$modules agents pydantic_ai.models.openai smolagents langgraph.prebuilt langchain_openai anthropic"
    modules="$modules tensorboard.summary.writer.event_file_writer wandb mlflow sqlalchemy trackio msgspec" ;;
esac
[ -n "$venv" ] || { [ "$kind" = cpu ] && venv=.venv || venv=".venv-$kind"; }
requirements="requirements/$role.txt"
no_deps="requirements/$role-no-deps.txt"
stamp="$venv/.slipstream-$kind"
uv_pin="uv==0.13.9"
wanted="$(cat requirements/"$role"*.txt ${cpu:+requirements/cpu.txt} pyproject.toml launch/setup.sh | sha256sum | cut -d' ' -f1) $PWD"
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  say "$venv is up to date"
  exit 0
fi

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
python="${PYTHON:-}"
for candidate in python3.11 python3.12 python3.13 python3; do
  if [ -z "$python" ] && fits "$candidate"; then python="$candidate"; fi
done
[ -n "$python" ] || fail "no Python 3.11 to 3.13 found (python3 is $(python3 -V 2>&1)); set PYTHON=/path/to/python3.11"
fits "$python" || fail "$python is $("$python" -V 2>&1); expected Python 3.11 to 3.13"
"$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module; on Debian and Ubuntu: apt install python3-venv"
[ "$kind" != cpu ] || "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
  || fail "libnuma.so.1 was not found, without which vLLM loads no kernels of the CPU; on Debian and Ubuntu: apt install libnuma1"
[ "$(uname -s)" = Linux ] || fail "Linux is needed (found $(uname -s)); on other systems use a container"
mkdir -p "$venv"
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c "import ${modules%% *}" 2>/dev/null; then
  free_gib=$(( $(df -Pk "$venv" | awk 'NR==2 {print $4}') / 1048576 ))
  [ "$free_gib" -ge "$need_gib" ] || fail "$free_gib GiB free under $venv; the $role environment needs $need_gib"
fi

if [ -n "$cpu" ]; then  # every pin but those of CUDA, torch's as its CPU build
  requirements="$venv/requirements.txt"
  sed -E '/^(nvidia|transformer-engine)/d; s/^torch==.*/&+cpu/' requirements/learner*.txt > "$requirements"
  no_deps=""
fi
torch_pin="$(grep -E '^torch==' "$requirements" || true)"
say "creating $venv with $("$python" -V)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

case "$kind" in
  learner|rollout) options="" more=", and torch's CUDA libraries" ;;
  *) options="--no-deps" ;;
esac
# Without dependencies to resolve, uv needs a third of pip's CPU time. It does not read pip's configuration: it gets the
# indexes from here, and the system's certificates.
uv=""
if [ -n "$options" ]; then
  uv="$(command -v uv || true)"
  [ -n "$uv" ] || { pip install --quiet "$uv_pin" 2>"$venv/pip.log" && uv="$venv/bin/uv"; } || say "no uv: using pip"
fi
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"
configured="$(pip config list)"
set_in_pip() {  # set_in_pip OPTION: its words; pip's variable goes before its files, and a virtual environment's file first
  local level found
  for level in :env: install '[a-z]*'; do
    found="$(sed -nE "s/^$level\.$1='(.+)'$/\1/p" <<<"$configured" | tail -n 1)"
    [ -z "$found" ] || { echo "${found//\\n/ }"; return; }
  done
}
indexes=""
for option in index-url extra-index-url find-links; do
  for place in $(set_in_pip "$option"); do indexes+="--$option $place "; done
done
case "$indexes" in *--extra-index-url*) indexes+="--index-strategy unsafe-first-match" ;; esac  # as pip, which looks at all

# add ARGUMENTS: with uv, or with pip where uv is absent or fails; says how far it is
add() {
  local packages=1 site
  site="$(echo "$venv"/lib/python3*/site-packages)"
  [ ! -f "${!#}" ] || packages="$(grep -cE '^[a-zA-Z]' "${!#}")"
  [ -n "$uv" ] && "$uv" pip install --color never --python "$venv/bin/python" $indexes "$@" 2>&1 \
    | follow "$venv/uv.log" "$packages" "$site" && return 0
  pip install --progress-bar off "$@" 2>&1 | follow "$venv/pip.log" "$packages" "$site"
}

# must_add ARGUMENTS: on failure the end of what pip said, without its remarks about configured indexes
must_add() {
  add "$@" && return 0
  grep -v '^WARNING: Location' "$venv/pip.log" | tail -n 20 >&2
  fail "pip install failed; the whole log is $venv/pip.log"
}

if [ "$role" = cpu ] || [ -n "$cpu" ]; then
  say "installing $torch_pin"
  if ! add --no-deps "$torch_pin"; then
    say "not on the configured index; using PyTorch's CPU wheel index"
    must_add --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch_pin"
  fi
fi
say "installing $(grep -cE '^[a-zA-Z]' "$requirements") pinned packages from $requirements${more:-}"
must_add $options -r "$requirements"
if [ -f "$no_deps" ]; then
  say "installing $no_deps (compiles for several minutes)"
  must_add --no-deps --no-build-isolation -r "$no_deps"
fi

if [ "$role" != adapters ]; then  # there, the node brings the modules that it needs
  say "installing slipstream itself"
  exec 9<launch/setup.sh
  flock 9  # another environment may be made at the same time, and this writes into the repository
  must_add --no-deps --no-build-isolation --editable .
  exec 9<&-
fi

say "checking that everything imports"  # and keep what that compiles: uv compiles nothing
env -u PYTHONDONTWRITEBYTECODE VLLM_LOGGING_LEVEL=ERROR "$venv/bin/python" -W ignore - $modules <<'PY' || fail "the environment is broken (see above)"
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"setup: import {name} failed: {type(error).__name__}: {error}")
PY
[ "$role" = adapters ] || "$venv/bin/slipstream" --help >/dev/null || fail "slipstream --help does not run"
echo "$wanted" > "$stamp"
say "done: $venv"
