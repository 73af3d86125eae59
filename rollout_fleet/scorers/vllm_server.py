"""vLLM's server on a CPU: `python -m rollout_fleet.scorers.vllm_server --model MODEL ...`. Its engine is a fork."""

import runpy
import sys
from pathlib import Path

from rollout_fleet.vllm_patches.engine_start import import_ahead

SERVER = "vllm.entrypoints.openai.api_server"

if __name__ == "__main__":
    import_ahead(Path(sys.argv[sys.argv.index("--model") + 1]))
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
