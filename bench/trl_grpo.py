"""TRL's trainers on Slipstream's model, task, group size, batch and optimizer; the peer of trl_comparison.py.

Runs in the environment of bench/requirements-trl.txt, on a CPU. `--way` is one of

    transformers  GRPOTrainer; transformers generates
    colocate      GRPOTrainer; vLLM in the same process generates, in turns with training
    server        GRPOTrainer; vLLM's server generates, in turns with training
    async         AsyncGRPOTrainer; vLLM's server generates while the trainer trains

Prints one JSON object: seconds from the process's start until training began, and per step the reward and the seconds
since then. `--threads` is per process.

`--task` is a workload of trl_workloads.py, or module:Class, an environment of one turn. `--save` is a folder for the
trained model.

The patches that all this needs are in trl_patches.py.
"""

import argparse
import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from typing import Any

import harness
import trl_patches

BEGAN = time.perf_counter()
MAX_NUM_SEQS = 128
KV_CACHE_GIB = 1


def common_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The optimizer, loss and sampling of the workload's Slipstream config."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trl-"), "per_device_train_batch_size": args.prompts * args.group_size,
        "gradient_accumulation_steps": 1, "num_generations": args.group_size,
        "max_completion_length": args.max_tokens,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "learning_rate": args.lr,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": args.warmup,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "epsilon": 0.2, "epsilon_high": 0.28, "max_steps": args.steps, "seed": args.seed,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "optim": "adamw_torch", "dataloader_num_workers": 0, "disable_tqdm": True,
    }  # fmt: skip


def reward_of(task: str, tokenizer: Any) -> Any:
    import trl_workloads

    if ":" in task:
        return trl_workloads.OneTurnReward(task, tokenizer.eos_token_id)
    game = task == "number_guessing"
    return trl_workloads.game_reward if game else trl_workloads.AdditionReward(tokenizer.eos_token_id)


def serve(args: argparse.Namespace) -> str:
    """Start vLLM's server as `trl vllm-serve` would; its address once it answers."""
    port = harness.free_port()
    words = {
        "model": args.model, "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": args.max_model_len,
        "max-num-seqs": MAX_NUM_SEQS, "weight-transfer-config": json.dumps({"backend": "gloo"}),
        "worker-extension-cls": "trl_patches.Extension", "logprobs-mode": "processed_logprobs", "max-logprobs": -1,
        "uvicorn-log-level": "warning", "distributed-executor-backend": "uni",
    }  # fmt: skip
    line = [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    environment = os.environ | {trl_patches.WORKER: "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    line += ["--enforce-eager"] if args.eager else []
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *line],
        env=environment, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True,
    )  # fmt: skip
    atexit.register(lambda: server.poll() is None and os.killpg(server.pid, signal.SIGTERM))
    url = f"http://127.0.0.1:{port}"
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"vLLM's server ended with {server.returncode}")


def synchronous(args: argparse.Namespace) -> Any:
    """GRPOTrainer with the way's generation."""
    import torch
    import trl
    import trl_workloads
    from transformers import AutoModelForCausalLM, AutoTokenizer

    vllm: dict[str, Any] = {}
    if args.way != "transformers":
        import trl.generation.vllm_generation as generation

        vllm = {"use_vllm": True, "vllm_mode": args.way, "vllm_max_model_length": args.max_model_len}
        generation.LLM = functools.partial(
            generation.LLM, dtype="float32", enforce_eager=args.eager, max_num_seqs=MAX_NUM_SEQS
        )
        trl_patches.keep_weights()
    if args.way == "server":
        vllm["vllm_server_base_url"] = serve(args)
        trl_patches.patch_server_client()
    settings = trl.GRPOConfig(
        **common_settings(args), **vllm, steps_per_generation=1, num_iterations=1, beta=0.0,
        loss_type="dapo", scale_rewards="group", shuffle_dataset=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.generation_config.do_sample = True
    return trl.GRPOTrainer(
        model=model, args=settings, reward_funcs=reward_of(args.task, tokenizer),
        train_dataset=trl_workloads.problems(args), processing_class=tokenizer,
        rollout_func=trl_workloads.play if args.task == "number_guessing" else None,
    )  # fmt: skip


def asynchronous(args: argparse.Namespace) -> Any:
    """AsyncGRPOTrainer beside a server."""
    import trl_workloads
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

    trl_patches.patch_asynchronous()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "A:",
        "fields": {"content": {"close_pattern": r"<eos>\s*", "content": "text"}},
    }  # fmt: skip
    if args.task == "number_guessing":
        async_grpo_trainer.AsyncRolloutWorker = trl_workloads.GameWorker
    settings = AsyncGRPOConfig(
        **common_settings(args), token_budget=0, max_staleness=args.max_staleness, vllm_server_base_url=serve(args)
    )
    return AsyncGRPOTrainer(
        model=args.model, args=settings, reward_funcs=reward_of(args.task, tokenizer),
        train_dataset=trl_workloads.conversations(trl_workloads.problems(args)), processing_class=tokenizer,
    )  # fmt: skip


def recorder(curve: list[dict[str, Any]], begin: list[float]) -> Any:
    """A callback that adds a point per step; it is the last one, so that TRL's own have set everything up."""
    from transformers import TrainerCallback

    names = {
        "sampling/sampling_logp_difference/mean": "logprob_difference", "completions/mean_length": "tokens_mean",
        "sample/staleness_mean": "staleness_mean", "perf/weight_sync_s": "sync_s",
    }  # fmt: skip

    class Recorder(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            begin.append(time.perf_counter())

        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" not in logs:
                return
            point = {"step": state.global_step, "time_s": round(time.perf_counter() - begin[0], 3)}
            point |= {"reward_mean": round(logs["reward"], 4)}
            curve.append(point | {short: float(f"{logs[long]:.3g}") for long, short in names.items() if long in logs})
            print(curve[-1], file=sys.stderr, flush=True)

    return Recorder()


def train(trainer: Any) -> dict[str, Any]:
    """The whole run; `set_up_s` are the seconds before its first step, imports and the server's start included."""
    from transformers.trainer_callback import PrinterCallback

    curve: list[dict[str, Any]] = []
    begin: list[float] = []
    trainer.add_callback(recorder(curve, begin))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return {"set_up_s": round(begin[0] - BEGAN, 2), "curve": curve}


def main() -> None:
    options: dict[str, Any] = {"model": str, "dataset": str, "seed": 1, "steps": 80, "max_tokens": 48, "lr": 3e-4}
    choices = {"choices": list(trl_patches.WAYS), "required": True}
    parser = harness.parser(
        __doc__, **options, way=choices, task="addition", prompts=16, group_size=8, threads=2,
        max_staleness=2, eager={"action": "store_true"}, save="", warmup=0,
    )  # fmt: skip
    args = parser.parse_args()
    args.max_model_len = args.max_tokens + 128
    os.environ |= {
        "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB), "VLLM_PLUGINS": "",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    } | ({"TORCHDYNAMO_DISABLE": "1"} if args.eager else {})  # fmt: skip
    warnings.filterwarnings("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    import torch
    import trl

    torch.set_num_threads(args.threads)
    trainer = (asynchronous if args.way == "async" else synchronous)(args)
    found = train(trainer)
    if args.save:
        trainer.save_model(args.save)
    result = {"system": f"trl {trl.__version__}", "way": args.way, "patches": trl_patches.names(args.way, args.task)}
    print("RESULT " + json.dumps(result | found), flush=True)


if __name__ == "__main__":
    main()
