"""slipstream init DIR: a job of one's own to begin with: data, reward functions, a config and a tiny model.

The job trains on two CPU cores in about a minute, without a network. Exit codes: 0 written, 2 the folder is not empty.
"""

import argparse
import tempfile
from pathlib import Path

from common.errors import EXIT_DONE, UsageError
from common.process.files import replace_folder
from launch.quickstart.assets import PRESETS, build_model, write_rows

SEED = 1
ROWS = [{"kind": kind} for kind in ("digits", "letters") * 16]
REWARDS = '''"""Rewards of this job: (completion, row) -> number. `row` is a line of data.jsonl."""


def right_kind(completion, row):
    """Share of the answer's characters that are of the row's kind."""
    right = str.isdigit if row["kind"] == "digits" else str.isalpha
    return sum(map(right, completion)) / max(len(completion), 1)
'''
CONFIG = """# slipstream up config.yaml in this folder; docs/rewards.md explains `tasks`, docs/config.md every key.
# For a real model, on GPUs, copy `tasks` into the file of its size in configs/. All other values here are for a tiny
# one: without dtype it is bfloat16, and lr: 1e-6, max_tokens: 1024, engine: {max_model_len: 1536} are usual then.
run:
  name: first-job
  dir: run                     # metrics, logs, checkpoints and the trained model
  steps: 100
model:
  path: model                  # random weights, 0.3 M parameters; a real one is Qwen/Qwen3-8B, of the hub
  dtype: float32
tasks:
  dataset: data.jsonl
  prompt: "{kind}: "           # {column} of a row
  reward:                      # the sum of these, each with its curve in the report
    - function: rewards:right_kind   # right_kind in rewards.py
    - {function: length_penalty, weight: 0.2, options: {max_tokens: 16, buffer_tokens: 8}}
learner:
  groups_per_step: 16          # rows of a step
  optimizer: {lr: 5e-4}
rollout:
  group_size: 8                # answers to each row
  max_tokens: 16
  engine: {max_model_len: 64, max_num_seqs: 128, kv_cache_mib: 64, eager: true}
"""
NEXT = """{folder}: data.jsonl, rewards.py, config.yaml and model. Next:
  cd {folder}
  slipstream doctor config.yaml    what is missing here, and whether the rewards judge the first row
  slipstream up config.yaml        trains, about a minute on two cores
  slipstream report run            plots of every reward; `slipstream transcripts run` shows answers"""


def command(args: argparse.Namespace) -> int:
    write_example(args.dir)
    print(NEXT.format(folder=args.dir))
    return EXIT_DONE


def write_example(folder: Path) -> None:
    """Write the job into `folder`, all or nothing; raises UsageError unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder; name a new one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
            work = Path(made) / folder.name
            work.mkdir()
            write_rows(work / "data.jsonl", ROWS)
            (work / "rewards.py").write_text(REWARDS)
            (work / "config.yaml").write_text(CONFIG)
            build_model(PRESETS["tiny"].model, SEED, work / "model")
            replace_folder(work, folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
