"""Patches that let Megatron-Core and Megatron-Bridge run without Transformer Engine, and without CUDA (gloo).

`enable()` comes before the first import of megatron. Where both are present it only leaves out imports that are not
needed. Without Transformer Engine the layers of layers.py and attention.py take its place, on any device. transformers
shares torch, so torch itself is left alone. Without CUDA one import hook gives modules under `megatron.` a view of
torch in which the CPU stands for the missing device.
"""

import builtins
import contextlib
import importlib.machinery
import importlib.metadata
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from common.config.parallel_layout import PLAIN
from common.errors import UsageError

# Every patch below was checked against these; another version needs another look.
VERIFIED = {"megatron-core": "0.16.1", "megatron-bridge": "0.3.1"}

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "arange", "full", "empty_like", "zeros_like", "ones_like")
# This kernel of the inference engine, which is not used here, imports triton unconditionally; others import the names.
_UNUSED = {
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
        "tensor_get_slice_after",
        "tensor_masked_update",
        "tensor_merge",
    ),
}
# These packages import every model of Megatron-Bridge, a fifth of a learner's start. Here they import nothing;
# conversion/model.py imports the bridges that are used.
_FAMILIES = tuple(f"megatron.bridge.models{name}" for name in ("", ".deepseek", ".glm", ".llama", ".mistral", ".qwen"))
# These import Transformer Engine unconditionally, for kinds of layers that no model has without it. They alone see
# classes in its place.
_LORA = ("megatron.bridge.peft.lora", "megatron.bridge.peft.lora_layers")
_NO_LAYERS = types.SimpleNamespace(
    **{name: type(name, (torch.nn.Module,), {}) for name in ("Linear", "LayerNormLinear")},
    ops=types.SimpleNamespace(Sequential=torch.nn.Sequential),
)

_view: types.ModuleType = torch
_patches: dict[str, Callable[[Any], None]] = {}


def fused() -> bool:
    """Whether Transformer Engine and its kernels are used; else the layers of this folder are."""
    return torch.cuda.is_available() and find_spec("transformer_engine") is not None and not os.environ.get(PLAIN)


def enable() -> None:
    """Prepare this process for megatron on what it has; repeated calls do nothing.

    Raises UsageError as `check_versions`, and RuntimeError when megatron was imported before.
    """
    if not fused() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        prepare(torch.cuda.is_available())
    known = importlib.metadata.version("megatron-bridge") == VERIFIED["megatron-bridge"]
    if known and _Families not in sys.meta_path:
        sys.meta_path.insert(0, _Families)


def prepare(cuda: bool) -> None:
    """`enable` without Transformer Engine, with or without CUDA."""
    global _view
    if any(name.startswith("megatron.") for name in sys.modules):
        raise RuntimeError("compat.enable() must come before the first import of megatron")
    check_versions()
    _patches.update(_ON_EVERY_DEVICE)
    if find_spec("transformer_engine") is not None:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # megatron's modules do not find it
    for module, names in _UNUSED.items():
        sys.modules[module] = _View(types.ModuleType(module), **{name: type(name, (), {}) for name in names})
    sys.meta_path.insert(0, _Finder())
    if not cuda:
        _view = _torch_view()
        _patches.update(_ON_CPU)
        torch.Tensor.cuda = lambda self, *args, **kwargs: self
        torch.nn.Module.cuda = lambda self, *args, **kwargs: self
        _patch_tensor_type()
    # megatron reports the missing CUDA kernels once per module
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed", category=UserWarning)
    logging.getLogger("megatron.bridge.utils.fusions").setLevel(logging.ERROR)
    from learner.megatron.cpu import layers

    layers.register()


def check_versions() -> None:
    """Raise UsageError for another version of megatron-core or megatron-bridge than the verified one."""
    for package, verified in VERIFIED.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise UsageError(f"{package} is not installed; `bash launch/setup.sh cpu` builds the environment") from None
        if found != verified:
            raise UsageError(
                f"without Transformer Engine the learner needs {package} {verified}, found {found}: "
                "its patches in learner/megatron/cpu/compat.py are verified for that version only"
            )


def _patch_tensor_type() -> None:
    """Megatron's optimizers sort parameters by `tensor.type() == 'torch.cuda.FloatTensor'`; say so to them alone."""
    type_of = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_of(self, *args, **kwargs)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if asked_by.startswith("megatron.core.optimizer") and not args and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_


class _View(types.ModuleType):
    """A module seen through another: its own names first, the real module's otherwise."""

    def __init__(self, real: types.ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Idle(contextlib.nullcontext[None]):
    """A CUDA stream or event: nothing to order on CPU. Stays a class, since annotations say `Stream | None`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __getattr__(self, name: str) -> Callable[..., "_Idle"]:
        return lambda *args, **kwargs: self


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory for which the CUDA device means the CPU."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapped


def _torch_view() -> _View:
    cuda = _View(
        torch.cuda,
        current_device=lambda: _CPU,
        synchronize=lambda *args, **kwargs: None,
        Stream=_Idle,
        Event=_Idle,
        current_stream=_Idle,
        stream=_Idle,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
    )

    def scatter(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        # gloo reads its inputs by raw pointer: a strided chunk sends wrong numbers, silently
        return dist.scatter(tensor, scatter_list and [x.contiguous() for x in scatter_list], *args, **kwargs)

    collectives = _View(dist, scatter=scatter, all_gather=_all_gather, reduce_scatter=_reduce_scatter)
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _View(torch, cuda=cuda, distributed=collectives, **factories)


def _all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
    """gloo refuses parts of different lengths, which are tokens that expert-tensor ranks exchange."""
    if all(part.shape == mine.shape for part in parts):
        return dist.all_gather(parts, mine.contiguous(), group=group, **kwargs)
    parts[dist.get_rank(group)].copy_(mine)
    for source, part in enumerate(parts):
        dist.broadcast(part, group_src=source, group=group)
    return None


def _reduce_scatter(mine: torch.Tensor, parts: list[torch.Tensor], *args: Any, group: Any = None, **kwargs: Any) -> Any:
    """The reverse of `_all_gather`, as a sum."""
    if all(part.shape == mine.shape for part in parts):
        return dist.reduce_scatter(mine, [part.contiguous() for part in parts], *args, group=group, **kwargs)
    total = torch.cat(parts)
    dist.all_reduce(total, *args, group=group)
    mine.copy_(total.split([len(part) for part in parts])[dist.get_rank(group)])
    return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a module, then exchanges its `torch` and `dist` and applies its patch."""

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in _LORA:
            vars(module)["__builtins__"] = vars(builtins) | {"__import__": _import_for_lora}
        super().exec_module(module)
        if module.__dict__.get("torch") is torch:
            vars(module)["torch"] = _view
        if module.__dict__.get("dist") is dist:
            vars(module)["dist"] = _view.distributed
        if patch := _patches.get(module.__name__):
            patch(module)


def _import_for_lora(name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "transformer_engine.pytorch":
        return types.SimpleNamespace(pytorch=_NO_LAYERS)
    return builtins.__import__(name, *args, **kwargs)


class _Families:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _FAMILIES:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)  # without a loader nothing is run
        spec.submodule_search_locations = [os.path.join(folder, name.rpartition(".")[2]) for folder in path]
        return spec


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith("megatron.") else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def _patch_random(module: Any) -> None:
    """The generator of 'the CUDA device' is the CPU's."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_moe_gemm(module: Any) -> None:
    """Without TE it uses te_general_gemm undefined."""
    module.te_general_gemm = None


def _patch_moe_utils(module: Any) -> None:
    """On CPU it hands split sizes over as tensors."""
    _patch_moe_gemm(module)
    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _patch_peft_utils(module: Any) -> None:
    """Without TE megatron-core has its names with other values, which the bridge would take for classes.

    An adapter's input is the output of a norm that belongs to the layer. For TE's class the bridge asks for it; for
    ours it would silently take the norm's input, and compute another function than Hugging Face's peft.
    """
    describe = module.get_adapter_attributes_from_linear

    def attributes(linear: Any, is_expert: bool = False) -> Any:
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = True
        return describe(linear, is_expert=is_expert)

    module.HAVE_TE = False
    module.get_adapter_attributes_from_linear = attributes


def _patch_distrib_optimizer(module: Any) -> None:
    """Make DistributedOptimizer save and load torch's AdamW, its inner optimizer without TE and Apex.

    Upstream has four faults. It cannot describe a state that does not exist yet (assert len(steps) == 1), so it cannot
    load in a new process. On load it gives every parameter the same `step` tensor, which AdamW then increments once per
    parameter. It takes `step` from the parameter state, which has none. It writes into fp32 parameters outside no_grad.
    """
    cls = module.DistributedOptimizer
    describe = cls.state_dict
    load = cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> dict[str, Any]:
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if not self.optimizer.state[p]:
                        fresh = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                        self.optimizer.state[p].update(step=torch.tensor(0.0), **fresh)
        return describe(self)

    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {**tensors, "step": state["step"]})

    @torch.no_grad()
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    cls.state_dict = state_dict
    cls.load_state_dict = load_state_dict
    cls._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


_ON_EVERY_DEVICE: dict[str, Callable[[Any], None]] = {
    "megatron.bridge.peft.utils": _patch_peft_utils,
    "megatron.core.optimizer.distrib_optimizer": _patch_distrib_optimizer,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_gemm,
}
_ON_CPU: dict[str, Callable[[Any], None]] = {
    "megatron.core.jit": lambda module: module.disable_jit_fuser(),  # torch.compile would take minutes for nothing
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
}
