"""TRL's GRPOTrainer on the quickstart's model, task, group size, batch and optimizer; the peer of trl_comparison.py.

Runs in the environment of bench/requirements-trl.txt. Prints one JSON object: per step the reward and the
seconds since training began, without set-up. `--dataset` is the addition task's JSONL. `--micro-batch` counts sequences
per forward; 0 is the whole batch.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import harness

PROMPTS, GROUP_SIZE = 16, 8  # a step has so many prompts, each with so many samples


def problems(args: argparse.Namespace) -> Any:
    """The task's rows in an order of the seed, as often as the steps need."""
    import torch
    from datasets import Dataset

    rows = harness.json_lines(Path(args.dataset))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed)).tolist()
    chosen = [rows[order[i % len(rows)]] for i in range(PROMPTS * (args.steps + 2))]
    return Dataset.from_dict(
        {"prompt": [f"Q: {r['question']}=? A:" for r in chosen], "answer": [str(r["answer"]) for r in chosen]}
    )


def settings(args: argparse.Namespace) -> Any:
    """The same optimizer, loss and sampling as configs/quickstart.yaml."""
    import trl

    batch = PROMPTS * GROUP_SIZE
    micro = args.micro_batch or batch
    return trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"), per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro, steps_per_generation=batch // micro,
        num_iterations=1, num_generations=GROUP_SIZE,
        max_completion_length=args.max_tokens, temperature=1.0, top_p=1.0, top_k=0, learning_rate=args.lr,
        lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28, loss_type="dapo", scale_rewards="group",
        max_steps=args.steps, seed=args.seed, use_cpu=True, bf16=False, gradient_checkpointing=False,
        logging_steps=1, report_to="none", save_strategy="no", optim="adamw_torch", shuffle_dataset=False,
        dataloader_num_workers=0, disable_tqdm=True,
    )  # fmt: skip


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run."""
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    curve: list[dict] = []

    def reward(completions, completion_ids, answer, **_):
        ended = [bool(ids) and ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        texts = [text.strip().split("=")[-1].strip() for text in completions]
        return [float(e and t == a) for e, t, a in zip(ended, texts, answer, strict=True)]

    class Recorder(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_log(self, _args, state, _control, logs=None, **_):
            if "reward" not in logs:
                return
            time_s = round(time.perf_counter() - self.begin, 3)
            curve.append({"step": state.global_step, "time_s": time_s, "reward_mean": round(logs["reward"], 4)})

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.do_sample = True
    trainer = trl.GRPOTrainer(
        model=model, args=settings(args), reward_funcs=reward, train_dataset=problems(args),
        processing_class=tokenizer, callbacks=[Recorder()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    samples = len(curve) * PROMPTS * GROUP_SIZE
    return {"system": f"trl {trl.__version__}", "samples": samples, "wall_s": curve[-1]["time_s"], "curve": curve}


def main() -> None:
    options: dict[str, Any] = {"model": str, "dataset": str, "seed": 0, "steps": 80, "max_tokens": 48, "lr": 3e-4}
    args = harness.parser(__doc__, **options, threads=2, micro_batch=0).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    sys.stdout.write("RESULT " + json.dumps(train(args)) + "\n")


if __name__ == "__main__":
    main()
