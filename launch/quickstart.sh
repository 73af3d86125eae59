#!/usr/bin/env bash
# From a fresh clone to a trained model and its plots, on a machine without a GPU:
#   launch/quickstart.sh [--web] [key=value ...]
# --web also serves the page of the job; in a terminal it is there again at the end, until Ctrl-C.
# The others override keys of configs/quickstart.yaml: run.seed=2 staleness.max=0.
# Running it again continues where it stopped; a finished run is not repeated. Another run.seed gets folders of its own;
# anything else that changes what is computed needs a run.dir=... of its own too.
set -euo pipefail
cd "$(dirname "$0")/.."

seed=1 run="" web="" words=()
for word in "$@"; do
  case "$word" in
    --web) web="--web --no-stay"; continue ;;
    run.seed=*) seed="${word#run.seed=}" ;;
    run.dir=*) run="${word#run.dir=}" ;;
    -h|--help) sed -n '2,7s/^# \{0,1\}//p' launch/quickstart.sh; exit 0 ;;
    *=*) ;;
    *) echo "quickstart: expected --web or key=value, found '$word'" >&2; exit 2 ;;
  esac
  words+=("$word")
done
set -- "${words[@]}"
case "$seed" in ''|*[!0-9]*) echo "quickstart: run.seed: expected an integer >= 0, found '$seed'" >&2; exit 2 ;; esac
suffix=""
[ "$seed" = 1 ] || suffix="-seed$seed"
assets="runs/assets$suffix" sft="runs/quickstart-sft$suffix" run="${run:-runs/quickstart$suffix}"
overrides=("model.path=$sft/model" "run.dir=$run" "tasks.dataset=$assets/addition/train.jsonl"
           "evaluation.datasets=[$assets/addition/held_out.jsonl]" "$@")

number=0 started=$SECONDS
step() {  # step TITLE COMMAND...
  local title="$1" begun=$SECONDS
  shift
  number=$((number + 1))
  printf '\n== %d. %s\n   %s\n' "$number" "$title" "$*"
  "$@"
  printf '== %d. done in %d s\n' "$number" $((SECONDS - begun))
}
need_model() {  # need_model RUN WHAT
  [ -f "$1/model/config.json" ] && return
  echo "quickstart: the $2 was stopped before it was done; the same command continues" >&2
  exit 1
}
trap 'echo "quickstart: stopped; the same command continues from here" >&2; exit 1' INT TERM

step "install into .venv" bash launch/setup.sh cpu
export PATH="$PWD/.venv/bin:$PATH"
installed=$SECONDS
# before the minutes of preparation, not after them
python -m launch.quickstart.assets --check configs/quickstart.yaml "$@" || { echo "quickstart: nothing was started" >&2; exit 2; }
step "make the model, the tokenizer and the problems" python -m launch.quickstart.assets --out "$assets" --seed "$seed"
if [ -f "$sft/model/config.json" ]; then
  printf '\n== warm start: %s is there already\n' "$sft/model"
else
  step "warm start: supervised fine-tuning on the Megatron learner" slipstream sft configs/quickstart-sft.yaml \
    "run.seed=$seed" "run.dir=$sft" "model.path=$assets/model" "tasks.dataset=$assets/addition/sft.jsonl"
  need_model "$sft" "warm start"
fi
step "reinforcement learning: broker, Megatron learner and vLLM node" slipstream up configs/quickstart.yaml $web \
  "${overrides[@]}"
need_model "$run" job
step "accuracy on held-out problems" slipstream eval "$run"
step "report" slipstream report "$run"
printf '\nquickstart: finished %d s after the installation (%d s in all); plots in %s/report, model in %s/model\n' \
  $((SECONDS - installed)) $((SECONDS - started)) "$run" "$run"
if [ -n "$web" ] && [ -t 0 ]; then
  echo "the page stays until Ctrl-C"
  exec slipstream web "$run"
fi
printf 'next: `slipstream web %s` shows the run in a browser\n' "$run"
