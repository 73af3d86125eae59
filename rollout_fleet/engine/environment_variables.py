"""Environment variables that vLLM and its libraries read once, at import; set them before importing torch or vllm."""

import os

from common.config.schema import Config


def prepare_environment(config: Config) -> bool:
    """Set what this machine's engine needs; returns whether it runs on the CPU."""
    # Without it the engine's OpenMP threads spin against the front process: 13 times slower on two cores.
    os.environ["OMP_NUM_THREADS"] = str(config.rollout.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a local folder; nothing may be fetched behind our back
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    if torch.cuda.is_available():
        return False
    if config.rollout.engine.devices == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else executor 'uni' becomes 'mp', a third process
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # nodes and a learner share the cores
    if config.rollout.engine.kv_cache_mib is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
    if config.rollout.engine.eager:
        # The one compiled function left (token ranks beside log-probabilities) takes 3 to 24 s at the first request.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return True
