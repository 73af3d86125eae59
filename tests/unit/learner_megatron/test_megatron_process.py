"""Runs megatron_process.py, the unit tests that need Megatron, in a process of its own, which has imported it already.

The patches of torch.Tensor and the import system last as long as the process, and no other test should see them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs import forked_ranks
from tests.rigs.processes import OURS, ROOT, write_to
from tests.rigs.waiting import LIMIT_S

INSIDE = Path(__file__).with_name("megatron_process.py")


# A machine with CUDA, with Transformer Engine installed but not wanted, up to the first call of a device.
ON_CUDA = """
import sys
import torch
from learner.megatron.cpu import compat

cuda = torch.Tensor.cuda, torch.nn.Module.cuda, torch.Tensor.type
torch.cuda.is_available = lambda: True
assert compat.fused()
compat.enable()
assert sys.meta_path[0] is compat._Families and not any(isinstance(one, compat._Finder) for one in sys.meta_path)
compat.os.environ[compat.PLAIN] = "1"
assert not compat.fused()
torch.cuda.is_available = lambda: False  # megatron's modules would ask the device
compat.prepare(cuda=True)
assert (torch.Tensor.cuda, torch.nn.Module.cuda, torch.Tensor.type) == cuda
import megatron.core.parallel_state as mpu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, distrib_optimizer
from megatron.core.transformer.moe import moe_utils
from learner.megatron.cpu.layers import PlainSpecProvider
from learner.megatron.conversion import model
from tests.rigs.processes import OURS

assert mpu.torch is torch and mpu.torch.cuda.current_device is torch.cuda.current_device
assert gpt_layer_specs.TESpecProvider is PlainSpecProvider and not gpt_layer_specs.HAVE_TE
assert USING_PYTORCH_OPTIMIZER and moe_utils.te_general_gemm is None
assert distrib_optimizer.DistributedOptimizer.load_state_dict.__module__ == compat.__name__
assert moe_utils.maybe_move_tensor_to_cpu.__module__ == moe_utils.__name__
"""


def run(words: list[str]) -> int:
    """In that process: the exit code of pytest, which writes to a log."""
    write_to(Path(words[0]))
    return pytest.main(["-q", "-p", "no:cacheprovider", "-W", "default", str(INSIDE)])


def test_the_parts_that_need_megatron(tmp_path: Path) -> None:
    log = tmp_path / "pytest.log"
    assert forked_ranks.finished(__name__, str(log)) == 0, log.read_text()[-6000:]
    assert " passed" in log.read_text()


def test_with_cuda_the_plain_layers_take_the_place_of_transformer_engine(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    _run("-W", "ignore", "-c", ON_CUDA, PYTHONPATH=f"{ROOT}:{tmp_path}")


def _run(*words: str, **environment: str) -> None:
    told = {"cwd": ROOT, "env": os.environ | OURS | environment, "timeout": 2 * LIMIT_S}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, **told)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
