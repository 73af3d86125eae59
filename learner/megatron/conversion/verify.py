"""The forward check at load: Megatron's log-probabilities against Hugging Face's, before anything is trained.

Megatron-Bridge translates some configurations wrongly without an error (bridge_fixes.py has those that are known).
Rank 0 runs the reference in transformers on the CPU.
"""

import gc
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor

from common.config.converted import Forward, is_converted, read_converted
from common.config.schema import MoeConfig, ParallelConfig
from common.errors import SlipstreamError, UsageError
from learner.backend_protocol import Microbatch
from learner.megatron import parallel
from learner.megatron.conversion import hf_folder, tiny_model
from learner.megatron.conversion.model import build
from learner.megatron.moe import Experts
from learner.megatron.schedule import Schedule

logger = logging.getLogger(__name__)

SMALL_BYTES = 512 << 20  # a folder with at most so many bytes of weights is compared as it is
DOCUMENTS = (96, 33, 7)  # positions; packed, so that documents must not see each other
# This share of the tokens must agree: near ties between experts may send a few elsewhere.
SHARE = 0.9
FLOOR_CPU, FLOOR_CUDA = 1e-3, 5e-2  # smallest limits in nats; CUDA multiplies float32 as TF32 in other kernels
ROUNDING = 4.0  # times the error that Hugging Face itself makes in the model's dtype


def check_translation(path: Path, config: Any, dtype: torch.dtype, layout: ParallelConfig) -> None:
    """Compare a miniature of `config`, the model's in `path`, under `layout`. Collective; raises UsageError.

    It has the model's dtype only where there is CUDA; in float32 on the CPU both agree to rounding.
    """
    layout = msgspec.structs.replace(layout, first_stage_layers=None, last_stage_layers=None)
    kind = dtype if torch.cuda.is_available() else torch.float32
    tracker = parallel.rng_tracker()
    state = tracker.get_states()
    random = torch.get_rng_state()
    small = tiny_model.config_of(config, layout)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        expected = _miniature(Path(folder), small, kind)
        try:
            model = build(Path(folder), hf_folder.read_config(Path(folder)), kind, layout, MoeConfig())
        except UsageError as error:
            raise UsageError(str(error).replace(folder, f"{path} (a miniature of it)")) from None
        model.bridge.load_hf_weights(model.chunks)
        experts = Experts(model.chunks, model.config, MoeConfig())
        schedule = Schedule(model.chunks, model.config, parallel.device(), experts)
        found = schedule.logprobs([_documents(small.vocab_size)], 1.0)[0]
        del model, experts, schedule
    gc.collect()
    tracker.set_states(state)  # the model that follows starts as if there had been none
    torch.set_rng_state(random)
    _judge(path, config, "a miniature of it", kind, found, expected)


def check_weights(
    path: Path, config: Any, dtype: torch.dtype, logprobs: Callable[..., list[Tensor]], rounded: bool = False
) -> Forward | None:
    """Compare the loaded model itself if its folder has at most SMALL_BYTES of weights. Collective; raises UsageError.

    `logprobs` is learner.backend_protocol.Backend.logprobs of the loaded model. Returns Hugging Face's results, None of
    a larger folder; with `rounded` they serve loads in bfloat16 too.
    """

    def compute() -> bytes:
        return msgspec.msgpack.encode(_of_folder(path, config, rounded or dtype != torch.float32))

    expected = msgspec.msgpack.decode(_of_rank_0(compute), type=Forward | None)
    if expected is not None:
        _judge(path, config, "it", dtype, logprobs([_documents(config.vocab_size)], 1.0)[0], expected)
    return expected


def _of_folder(path: Path, config: Any, rounded: bool) -> Forward | None:
    """A converted folder has kept them from its source."""
    if is_converted(path):
        return read_converted(path).forward
    if sum(file.stat().st_size for file in path.glob("*.safetensors")) > SMALL_BYTES:
        return None
    model = getattr(transformers, config.architectures[0]).from_pretrained(path, dtype=torch.float32).eval()
    return _expected(model, rounded)


def _miniature(folder: Path, config: Any, dtype: torch.dtype) -> Forward:
    """Put the same miniature into every rank's own `folder`."""
    names = ("config.json", "model.safetensors")
    rounded = dtype != torch.float32

    def compute() -> bytes:
        model = tiny_model.new_model(config)
        model.save_pretrained(folder)
        return msgspec.msgpack.encode(([(folder / name).read_bytes() for name in names], _expected(model, rounded)))

    files, expected = msgspec.msgpack.decode(_of_rank_0(compute), type=tuple[list[bytes], Forward])
    for name, data in zip(names, files, strict=True):
        (folder / name).write_bytes(data)
    return expected


def _of_rank_0(compute: Callable[[], bytes]) -> bytes:
    """Rank 0's result on every rank; its failure too, or the others would wait. Collective."""
    if torch.distributed.get_rank() == 0:
        transformers.utils.logging.disable_progress_bar()
        try:
            return parallel.broadcast_bytes(compute())
        except Exception:
            parallel.broadcast_bytes(b"")
            raise
    data = parallel.broadcast_bytes(None)
    if not data:
        raise SlipstreamError("rank 0 could not run the model in Hugging Face transformers; its log says why")
    return data


def _documents(vocabulary: int) -> Microbatch:
    random = torch.Generator().manual_seed(11)
    documents = [torch.randint(vocabulary, (n + 1,), generator=random) for n in DOCUMENTS]
    tokens = torch.cat([d[:-1] for d in documents])
    targets = torch.cat([d[1:] for d in documents])
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])
    zero = torch.zeros(sum(DOCUMENTS))
    return Microbatch(tokens, targets, positions, DOCUMENTS, zero + 1, advantages=zero, behavior_logprobs=zero)


@torch.no_grad()
def _logprobs(model: Any, batch: Microbatch) -> Tensor:
    rows = [
        model(tokens[None]).logits[0].float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        for tokens, targets in zip(batch.tokens.split(DOCUMENTS), batch.targets.split(DOCUMENTS), strict=True)
    ]
    return torch.cat(rows)


def _expected(model: Any, rounded: bool) -> Forward:
    """Hugging Face's results of a float32 model, which `rounded` leaves in bfloat16."""
    batch = _documents(model.config.vocab_size)
    exact = _logprobs(model, batch)
    rounding = _difference(_logprobs(model.to(torch.bfloat16), batch), exact) if rounded else 0.0
    return Forward(exact.tolist(), rounding)


def _difference(found: Tensor, expected: Tensor) -> float:
    return (found - expected).abs().double().quantile(SHARE).item()


def _limit(expected: Forward, dtype: torch.dtype) -> float:
    """The largest difference that passes, in nats."""
    floor = FLOOR_CUDA if torch.cuda.is_available() else FLOOR_CPU
    return floor if dtype == torch.float32 else floor + ROUNDING * expected.rounding


def _judge(path: Path, config: Any, what: str, dtype: torch.dtype, found: Tensor, expected: Forward) -> None:
    difference = _difference(found, torch.tensor(expected.logprobs))
    limit = _limit(expected, dtype)
    logger.debug("forward check of %s: difference %.2g, limit %.2g", what, difference, limit)
    if difference > limit:
        raise UsageError(
            f"model.path: {path}: Megatron computes {config.architectures[0]} otherwise than Hugging Face. "
            f"Log-probabilities of {what} differ by {difference:.2g} (limit {limit:.2g}; the {SHARE:.0%} "
            f"quantile over {len(found)} tokens). Training would be wrong. model.verify: false loads it all the same"
        )
