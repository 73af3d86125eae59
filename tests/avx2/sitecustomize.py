"""With this folder on PYTHONPATH torch says that the CPU has AVX2 and nothing newer, so vLLM loads `_C_AVX2`.

vLLM chooses its library in every process by these functions of torch.cpu (platforms/cpu.py, import_kernels).
"""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # torch's own kernels


class Older(importlib.abc.MetaPathFinder):
    """Loads torch.cpu as usual, and then replaces what it says."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_older(module: Any) -> None:
            load(module)
            for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
                assert hasattr(module, name), f"torch.cpu has no {name}: adapt tests/avx2"
                setattr(module, name, lambda: False)

        spec.loader.exec_module = load_older  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Older())
