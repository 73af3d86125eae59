"""vLLM's server on a CPU: `python -m rollout_fleet.scorers.vllm_server --model MODEL ...`.

Its engine and that one's worker are forks. vLLM itself starts both anew, with all of their imports.
"""

import runpy
import sys
from pathlib import Path

from rollout_fleet.vllm_patches.engine_start import import_ahead

SERVER = "vllm.entrypoints.openai.api_server"

if __name__ == "__main__":
    import_ahead(Path(sys.argv[sys.argv.index("--model") + 1]), has_workers=True)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
