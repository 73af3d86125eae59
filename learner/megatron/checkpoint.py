"""Megatron's distributed checkpoints: weights, optimizer, step and random state, loadable under another layout.

With adapters only these are saved, and what they belong to: the rest of the model is in model.path.

A thread writes a copy while training continues. Upstream forks writers instead, which is unsafe in a process with live
gloo or CUDA threads. A folder without its index, which is written last, is no checkpoint.
"""

import io
import math
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from common.config.schema import ParallelConfig
from common.errors import SlipstreamError, UsageError
from common.process.files import sync
from learner.megatron import parallel
from learner.megatron.lora import PART
from learner.megatron.optimizer import Optimizer
from learner.megatron.own_states import OwnStates

FORMAT = 2
DISK_POLL_S = 1.0
PIECES = 8  # into which `save_weights` cuts a matrix that tensor-parallel ranks share; fewer where 8 is no divisor
_COMMON, _INDEX = "common.pt", "metadata.json"  # Megatron's names
_EXTRA = "_extra_state"  # in names of what Transformer Engine keeps for FP8; without it no layer has such a state


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, one file per rank; hands out the plan of a save instead of callbacks."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        return writer, save_state_dict_ret[1]


class CheckpointSave:
    """One rank's share of one checkpoint on its way to the disk."""

    def __init__(self, path: Path, sharded: Any, common: dict[str, Any], host: "HostCopies | None" = None) -> None:
        """Plan the save into the empty folder `path` and copy the share to host memory. Collective.

        `sharded` is Megatron's sharded state, preprocessed, and `common` the state that is the same on every rank.
        `host` is where the copies go. None: nothing changes the share until it is written, so that none is needed.
        """
        self.path = path
        self.results = []
        self.problem = ""
        # prepare_write_data uses this queue; without it, it would start a process for one
        filesystem_async._results_queue = queue.Queue()
        strategy: Any = _PlanOnly()
        tensors = [each.data for each in nested_values(sharded) if isinstance(each, ShardedTensor)]
        live = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
        self._config = CheckpointingConfig(strategy.backend, strategy.version)
        self._writer, self._metadata = strategy.async_save(sharded, self.path)
        self._transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        self._buckets = [
            (file, key, (objects, [(item, _copied(item, tensor, live, host)) for item, tensor in tensors]))
            for file, key, (objects, tensors) in self._writer.write_buckets
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._writer.write_buckets = None  # else the device tensors live until the end of the save
        self._common = common if dist.get_rank() == 0 else None
        self.thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """The thread: everything that this rank writes, flushed."""
        try:
            if self._common is not None:
                encoded = io.BytesIO()
                torch.save(self._common, encoded)
                (self.path / _COMMON).write_bytes(encoded.getbuffer())
                sync(self.path / _COMMON)
            for bucket in self._buckets:
                self.results += _write(self._transforms, bucket)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            self._buckets = []

    def publish(self, told: Sequence[bytes]) -> None:
        """Rank 0, when every rank has told what it has written: the index. Raises OSError."""
        self._writer.finish(self._metadata, [_results(each) for each in told])  # flushes what it writes
        save_config(self._config, str(self.path))
        sync(self.path / _INDEX)
        sync(self.path)


def _results(told: bytes) -> list[WriteResult]:
    """Where a rank has written its tensors and objects."""
    results = msgspec.msgpack.decode(told, type=list[WriteResult], dec_hook=lambda kind, value: kind(value))
    return [replace(result, storage_data=_StorageInfo(**result.storage_data)) for result in results]


class HostCopies:
    """Host memory for a rank's share, which every save uses again: to page-lock 50 GiB takes tens of seconds."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    def of(self, index: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the part `index`, which is complete when the device is synchronized."""
        kept = self._kept.get(index)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[index] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return kept.copy_(tensor, non_blocking=True)


def _copied(item: Any, tensor: torch.Tensor, live: set[int], host: HostCopies | None) -> torch.Tensor:
    """In host memory, where the next step does not change it; upstream has copied views there already."""
    if host is None:
        return tensor.cpu()
    changes = tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() in live
    return host.of(item.index, tensor) if changes else tensor


def _write(transforms: list[Any], bucket: Any) -> list[Any]:
    done = queue.Queue()
    running = queue.Queue()
    running.put(0)
    writer: Any = filesystem_async.FileSystemWriterAsync
    writer.write_preloaded_data(transforms, 0, bucket, done, running, use_fsync=True)
    outcome = done.get_nowait()[1]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class CheckpointWriter:
    """Saves and loads the checkpoints of one model and its optimizer; one save at a time."""

    def __init__(
        self, chunks: list[Any], optimizer: Optimizer, layout: ParallelConfig, adapters: dict[str, Any] | None = None
    ) -> None:
        """`adapters` is the identity of the chunks' adapters."""
        self.chunks = chunks
        self.optimizer = optimizer
        self.layout = layout
        self.adapters = adapters
        self._save: CheckpointSave | None = None
        self._host = HostCopies()
        self._writers: Any = None  # which of the ranks that have the same weight writes it
        self._validated = False

    def start(self, path: Path) -> None:
        """Begin to write the present state into the new folder `path`, when the last save is done. Collective.

        Raises SlipstreamError when the folder cannot be made.
        """
        problem = ""
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        _raise_everywhere(path, problem)
        state, _ = self._state(loading=False)
        state["random_state"] = _random_state()
        # Whether every shard has exactly one owner is the same for all saves of a process: check it once.
        sharded: Any
        sharded, _ = save_preprocess(state, not self._validated, lambda rest: {})
        header = {"format": FORMAT, "steps": self.optimizer.steps, "layout": _sizes(self.layout)}
        common = {"slipstream": header | {"adapters": self.adapters}}
        weights = {key: part for key, part in sharded.items() if key.startswith("model")}
        replicas: Any = mpu.get_data_parallel_group(with_context_parallel=True)
        if not self._validated:
            self._writers = determine_main_replica_uniform_distribution(weights, replicas)
        distribute_main_replicas_with_precomputed_distribution(weights, replicas, self._writers)
        self._validated = True
        self._save = CheckpointSave(path, sharded, common, self._host)

    def done(self, wait: bool) -> bool:
        """Whether the last save is complete on the disk; with `wait` it is on return. Collective.

        Raises SlipstreamError when it could not be written; then there is no folder of its name.
        """
        save = self._save
        if save is None:
            return True
        while True:
            if wait:
                save.thread.join(DISK_POLL_S)  # a slow disk may take longer than a collective
            told = parallel.gather(msgspec.msgpack.encode((save.thread.is_alive(), save.problem)))
            reports = [msgspec.msgpack.decode(report, type=tuple[bool, str]) for report in told]
            problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(reports) if problem]
            if problems or not any(running for running, _ in reports):
                break
            if not wait:
                return False
        self._save = None
        problem = "; ".join(problems)
        results = parallel.gather_to_lead(msgspec.msgpack.encode(save.results))
        if dist.get_rank() == 0:
            try:
                if not problem:
                    save.publish(results)
            except OSError as error:
                problem = f"rank 0: {type(error).__name__}: {error}"
            if problem:
                shutil.rmtree(save.path, ignore_errors=True)  # a full disk needs the space
        _raise_everywhere(save.path, problem)
        return True

    def load(self, path: Path) -> None:
        """Restore what a save wrote; random state only under the same layout. Collective.

        Raises UsageError when there is no checkpoint, one of another format, one that this model does not fit, or one
        of other adapters.
        """
        header = _header(path, self.adapters)
        here = _sizes(self.layout)
        same_layout = header["layout"] == here
        self.optimizer.steps = header["steps"]
        state, states = self._state(loading=True)
        if same_layout:
            state["random_state"] = _random_state()
        loaded = _read(path, state, header, here)
        for i, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(loaded[_key(i, self.chunks)], strict=self.adapters is None)
        if states is None:
            self.optimizer.start_afresh()
        else:
            states.take_over()
        if same_layout:
            random = loaded["random_state"]
            torch.set_rng_state(random["cpu"])
            parallel.rng_tracker().set_states(random["tracker"])
            if torch.cuda.is_available() and "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"])

    def _state(self, loading: bool) -> tuple[dict[str, Any], OwnStates | None]:
        """Sharded tensors of the model and the optimizer's states; the rest follows from the config and the step."""
        state = _weights([chunk.module for chunk in self.chunks])
        if self.adapters is not None:
            state = _adapters_of(state)
        if self.optimizer.steps == 0:  # the states are zeros, and no optimizer has made them yet
            return state, None
        states = self.optimizer.own_states(state, loading)
        return {**state, "optimizer": states.boxes}, states


def load_weights(path: Path, chunks: list[Any], layout: ParallelConfig, adapters: dict[str, Any] | None = None) -> None:
    """Load nothing but a checkpoint's weights into bare chunks, or their adapters, which have the identity `adapters`.

    Collective; raises as CheckpointWriter.load does.
    """
    header = _header(path, adapters)
    state = {
        key: {name: part for name, part in found.items() if _EXTRA not in name and (PART in name) == bool(adapters)}
        for key, found in _weights(chunks, header.get("apart", False)).items()
    }
    loaded = _read(path, state, header, _sizes(layout))
    for i, chunk in enumerate(chunks):
        here = chunk.state_dict()
        kept = {name: own for name, own in here.items() if _EXTRA in name}
        chunk.load_state_dict(loaded[_key(i, chunks)] | kept, strict=not any(PART in name for name in here))


def save_weights(path: Path, chunk: Any) -> None:
    """Write the weights of a model on one rank into the new folder `path`, durably, and free their memory.

    A reader takes pieces whole. So shared matrices are cut as PIECES tensor-parallel ranks would cut them: a rank then
    reads its own part only. Layers have names of their own, since planning a read of stacked ones takes quadratic time.
    Raises SlipstreamError when they cannot be written.
    """
    path.mkdir()
    key = _key(0, [chunk])
    sharded: Any
    sharded, _ = save_preprocess({key: _without_extra(_weights([chunk], apart=True)[key])}, True, lambda rest: {})
    weights = sharded[key]
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) and parameter.dim() > 1 and ".experts." not in name:
            wholes = weights[name] if isinstance(weights[name], list) else [weights[name]]  # gate and up are two
            weights[name] = [piece for whole in wholes for piece in _pieces(whole, parameter.partition_dim)]
            parameter.data.untyped_storage().resize_(0)
    header = {"format": FORMAT, "steps": 0, "layout": _sizes(ParallelConfig()), "apart": True}
    save = CheckpointSave(path, sharded, {"slipstream": header})
    save.thread.join()
    if save.problem:
        raise SlipstreamError(f"{path} could not be written: {save.problem}")
    save.publish([msgspec.msgpack.encode(save.results)])


def _pieces(whole: Any, axis: int) -> list[ShardedTensor]:
    """Copies of equal parts of a ShardedTensor along an axis of the local tensor."""
    at = whole.prepend_axis_num + axis
    count = math.gcd(whole.local_shape[axis], PIECES)
    grid = [*whole.axis_fragmentations]
    grid[at] *= count
    pieces: list[ShardedTensor] = []
    for part in whole.data.detach().chunk(count, axis):
        offset = [*whole.global_offset]
        offset[at] += len(pieces) * part.shape[axis]
        cut = {"local_shape": tuple(part.shape), "global_offset": tuple(offset), "axis_fragmentations": tuple(grid)}
        pieces.append(replace(whole, data=part.clone(memory_format=torch.contiguous_format), **cut))
    return pieces


def _header(path: Path, adapters: dict[str, Any] | None) -> dict[str, Any]:
    if not (path / _INDEX).is_file():
        raise UsageError(f"{path} is not a checkpoint: no {_INDEX} in it")
    try:
        header = dist_checkpointing.load_common_state_dict(str(path)).get("slipstream", {})
    except Exception as error:  # torch raises whatever its readers of zip files and pickles raise
        raise UsageError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if header.get("format") != FORMAT:
        raise UsageError(f"{path}: checkpoint format {header.get('format')}, this learner reads {FORMAT}")
    _check_adapters(path, header.get("adapters"), adapters)
    return header


def _check_adapters(path: Path, saved: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    """Raise UsageError unless the adapters of a checkpoint are those of this learner, beside the same weights."""
    if saved == here:
        return
    if saved is None or here is None:
        contents, expected = ("whole weights", "unset") if saved is None else ("adapters", f"the section {saved}")
        found = "unset" if here is None else "a section"
        raise UsageError(f"learner.lora: expected {expected}, found {found}; {path} is a checkpoint of {contents}")
    name = next(name for name in saved if saved[name] != here[name])
    if name == "base":
        raise UsageError(f"model.path: expected the weights beside which the adapters of {path} trained, found others")
    raise UsageError(f"learner.lora.{name}: expected {saved[name]}, as in {path}, found {here[name]}")


def _read(path: Path, state: dict[str, Any], header: dict[str, Any], here: dict[str, int]) -> dict[str, Any]:
    try:
        loaded: Any = dist_checkpointing.load(state, str(path))
        return loaded
    except (CheckpointException, CheckpointingException, KeyError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[-1]  # torch's text has tracebacks above it
        raise UsageError(
            f"{path}: written under {_words(header['layout'])}, does not load under {_words(here)} with this model: "
            f"{reason}"
        ) from error


def _weights(modules: list[Any], apart: bool = False) -> dict[str, Any]:
    """Megatron's sharded state of each module; `apart`: layers have names of their own, instead of one for all."""
    metadata = ensure_metadata_has_dp_cp_group({"singleton_local_shards": False, "non_homogeneous_layers": apart})
    return {_key(i, modules): module.sharded_state_dict(metadata=metadata) for i, module in enumerate(modules)}


def _adapters_of(states: dict[str, Any]) -> dict[str, Any]:
    return {key: {name: part for name, part in state.items() if PART in name} for key, state in states.items()}


def _without_extra(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in state.items() if _EXTRA not in name}


def _sizes(layout: ParallelConfig) -> dict[str, int]:
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    return {name: getattr(layout, name) for name in names} | {"data": mpu.get_data_parallel_world_size()}


def _raise_everywhere(path: Path, problem: str) -> None:
    """Rank 0's problem as an error on every rank; none if it is empty. Collective."""
    told = parallel.broadcast_bytes(problem.encode() if dist.get_rank() == 0 else None).decode()
    if told:
        raise SlipstreamError(
            f"checkpoint {path} could not be written: {told}; older checkpoints are untouched, and the next start "
            "resumes from the newest"
        )


def _key(index: int, chunks: list[Any]) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def _words(layout: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in layout.items() if size > 1) or "one rank"


def _random_state() -> ShardedObject:
    state = {"cpu": torch.get_rng_state(), "tracker": parallel.rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    rank = dist.get_rank()
    size = dist.get_world_size()
    return ShardedObject("random_state", state, (size,), (rank,), replica_id=0)
