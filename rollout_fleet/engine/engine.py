"""The rollout engine: vLLM's AsyncLLM behind tokens in, tokens out, with a policy version for every token.

A result with tokens of unproven weights is delayed until the proof is there. So nothing sampled from wrong weights
leaves the engine.
"""

import asyncio
import itertools
import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import psutil

from common.config.observing import TelemetryConfig
from common.config.passthrough import passthrough_warnings
from common.config.schema import Config
from common.errors import SlipstreamError, UsageError
from common.rollouts import VersionRun
from common.weights.receive.weight_client import WeightClient
from rollout_fleet.engine import scheduler_stats
from rollout_fleet.episode.sampler_protocol import EngineCounters, FinishReason, Generation, Session
from rollout_fleet.vllm_patches import engine_start, shared_files, socket_folder
from rollout_fleet.vllm_patches.engine_process import salt, session_key
from rollout_fleet.vllm_plugin import BACKEND
from rollout_fleet.weights.engine_weights import UNLABELLED, EngineWeights

logger = logging.getLogger(__name__)

SHUTDOWN_S = 2.0  # for the engine process, which has nothing worth saving
WORKERS_END_S = 10.0  # for its workers, once they were killed
LEAST_SHARE = 0.01  # so much of a GPU's memory must be free at the start
MOST_PROFILED_STEPS = 500  # engine steps; a profile with more would take long to write
PROFILE_LOOK_S = 0.5


class Engine:
    """One vLLM engine. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        weights: Literal["random", "folder"] = "random",
        stop_token_ids: list[int] | None = None,  # that end a generation; None: the folder's end-of-sequence tokens
        seed: int | None = None,  # the sampler's; None: the config's. Give every node its own.
        profiles: Path | None = None,  # folder of profiles; None: it can take none
    ) -> None:
        """Nothing is started yet.

        `weights` are 'random' when they come from a learner; `generate` refuses until the first flip. 'folder' loads
        those of the model folder (version -1).
        """
        self._config = config
        self._random = weights == "random"
        self._profiles = profiles
        self._seed = config.run.seed if seed is None else seed
        self.stop_token_ids = end_tokens(Path(config.model.path)) if stop_token_ids is None else stop_token_ids
        self.counters = EngineCounters()
        self._numbers = itertools.count()
        self._llm: Any = None
        self._vocabulary = 0  # the model's, known when the engine is up
        self._moe_layers: list[int] | None = None  # whose routing is recorded; None: it is not
        self._creator: ThreadPoolExecutor | None = None
        self._workers: list[shared_files.Worker] = []
        self.weights = EngineWeights(recompute=config.weights.kv_cache == "recompute")

    @property
    def holds(self) -> int:
        """Number of requests of full length that fit into the KV cache; known once the engine is up."""
        config = self._llm.vllm_config
        return config.cache_config.num_gpu_blocks * config.cache_config.block_size // config.model_config.max_model_len

    async def start(self) -> None:
        """Bring the engine up (seconds to minutes) beside the event loop.

        Raises UsageError for a model that it cannot serve, SlipstreamError for any other reason.
        """
        # The engine process dies with the *thread* that made it, so this one must live as long as the engine.
        self._creator = ThreadPoolExecutor(1, "vllm-parent")
        try:
            self._llm = await asyncio.get_running_loop().run_in_executor(self._creator, self._create)
            await self._check_rounding()
            if "generate" not in await self._llm.get_supported_tasks():
                raise UsageError(f"{self._config.model.path} is no model that generates text; see its config.json")
        except Exception as error:
            await self.shutdown()
            if isinstance(error, UsageError):
                raise
            raise SlipstreamError(f"the vLLM engine did not start: {error}") from error
        if self._config.learner.moe.replay_routing:
            self._moe_layers = (await self._llm.collective_rpc("slipstream_moe_layers"))[0]
        found = await self._llm.collective_rpc("slipstream_shared_files")
        self._workers = [msgspec.msgpack.decode(one, type=shared_files.Worker) for one in found]
        shared_files.record(self._workers)
        self._vocabulary = int(self._llm.model_config.get_vocab_size())
        rounded = self._config.rollout.engine.quantization is not None
        await self.weights.attach(self._llm, usable=not self._random, rounded=rounded)

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
        session: Session | None = None,
    ) -> Generation:
        """As Sampler.generate; SlipstreamError also when there are no weights yet or they are excluded."""
        self.weights.check_usable()
        for token in (min(prompt_ids, default=0), max(prompt_ids, default=0)):
            if not 0 <= token < self._vocabulary:  # vLLM would end there: it has no tokenizer that knows the vocabulary
                raise ValueError(f"token {token}, the model has 0 to {self._vocabulary - 1}")
        request_id = str(next(self._numbers))
        label, key = self.weights.label, None
        if session is not None and self._config.weights.kv_cache == "keep_episode":
            if not session.label:
                session.first_prompt = len(prompt_ids)
            label = session.label or label
            key = session_key(session.number, session.first_prompt)
        prompt = {"type": "token", "prompt_token_ids": prompt_ids, "cache_salt": salt(label)}
        params = _sampling_params(max_tokens, temperature, top_p, seed=seed, stop_token_ids=tuple(self.stop_token_ids))
        output = await self._request(request_id, prompt, params, key)
        if session is not None and not session.label:
            spans = output.outputs[0].weight_versions or []
            session.label = next((span.version for span in spans if span.end > span.start), "")
        generation = to_generation(output, self._moe_layers)
        await self.weights.wait_proven(run.version for run in generation.version_runs)
        self.counters.requests += 1
        self.counters.tokens_generated += len(generation.tokens)
        self.counters.prompt_tokens += len(prompt_ids)
        self.counters.cached_tokens += output.num_cached_tokens or 0
        return generation

    async def profile(self, name: str | None) -> None:
        """Begin a profile whose files begin with `name`; None: write it, while the engine waits. Raises as vLLM."""
        await (self._llm.stop_profile() if name is None else self._llm.start_profile(name))

    async def shutdown(self) -> None:
        """Abort what runs and end the engine's processes; safe to call twice."""
        llm = self._llm
        creator = self._creator
        self._llm = self._creator = None
        loop = asyncio.get_running_loop()
        if llm is not None:
            self.weights.detach()
            from vllm.v1.engine.exceptions import EngineDeadError

            if llm.output_handler is not None:  # it would take the end of the process for a death
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler])
            llm.output_processor.propagate_error(EngineDeadError())  # for those who wait for an answer
            try:
                await loop.run_in_executor(creator, lambda: llm.shutdown(timeout=SHUTDOWN_S))
            except psutil.NoSuchProcess:
                # vLLM kills a late engine's children first, and fails at one that has just ended.
                for process in llm.engine_core.resources.engine_manager.processes:
                    process.kill()
            llm.shutdown = lambda timeout=None: None  # AsyncLLM.__del__ calls it again, when its imports may be gone
            # vLLM leaves its ZeroMQ context, with two threads, to the garbage collector. Its sockets, made by the
            # asynchronous view of the context, are closed on this loop by now; any left would make this wait forever.
            for socket in list(llm.engine_core.ctx._sockets):
                socket.close(linger=0)
            llm.engine_core.resources.ctx.destroy(linger=0)
            await loop.run_in_executor(creator, shared_files.remove_after, self._workers, WORKERS_END_S)
        if creator is not None:
            await loop.run_in_executor(None, creator.shutdown)

    async def _check_rounding(self) -> None:
        """Ask the live model: a layer that vLLM silently leaves unrounded is an error."""
        if self._config.rollout.engine.quantization is None:
            return
        for left in await self._llm.collective_rpc("slipstream_unrounded_layers"):
            if left:
                few = f"{', '.join(left[:3])}{', ...' if left[3:] else ''}"
                raise UsageError(f"rollout.engine.quantization: the engine did not round {len(left)} layers ({few})")

    async def _request(self, request_id: str, prompt: Any, params: Any, session: str | None) -> Any:
        """The final RequestOutput of one request."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._llm is None:
            raise SlipstreamError("the engine is not running")
        try:
            # To its end: a generator that is left half-way aborts its request, also one that is through.
            asked = self._llm.generate(prompt, params, request_id, session_id=session)
            outputs = [output async for output in asked]
            if outputs and outputs[-1].finished:
                return outputs[-1]
        except EngineDeadError as error:
            reason = "was shut down" if self._llm is None else "died; its process's log has the reason"
            raise SlipstreamError(f"the vLLM engine {reason}") from error
        except (VLLMClientError, ValueError, EngineGenerateError) as error:
            cause = error.__cause__ if isinstance(error, EngineGenerateError) else error
            if isinstance(cause, (VLLMClientError, ValueError)):
                raise ValueError(f"the engine refused the request: {cause}") from error
            raise SlipstreamError(f"the engine failed on a request: {cause or error}") from error
        raise SlipstreamError("the engine ended a request without a result")

    def _create(self) -> Any:
        """Build AsyncLLM; blocks for the whole start."""
        shared_files.remove_left_files()
        on_cpu = prepare_environment(self._config)
        for warning in passthrough_warnings(self._config):
            logger.warning("%s", warning)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_start.register_models(engine_start.architectures_of(Path(self._config.model.path)) or ())
        watched = self._config.rollout.concurrency == "auto"  # costs some time at every engine step
        loggers = [scheduler_stats.stat_logger(self.counters, lambda: self.weights.half_flips)] if watched else None
        arguments = AsyncEngineArgs(**self._arguments(on_cpu))
        # It selects vLLM's default of max_num_batched_tokens: without, it is 2,048 on every device.
        context = UsageContext.OPENAI_API_SERVER
        return AsyncLLM.from_engine_args(arguments, usage_context=context, stat_loggers=loggers)

    def _arguments(self, on_cpu: bool) -> dict[str, Any]:
        from vllm.config.weight_transfer import WeightTransferConfig

        engine = self._config.rollout.engine
        arguments: dict[str, Any] = {
            "model": self._config.model.path,
            "dtype": engine.dtype(self._config.model.dtype),
            "quantization": engine.quantization,
            "load_format": "dummy" if self._random else "auto",
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # sampling follows the caller, never a default of the folder
            "seed": self._seed,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_batched_tokens,
            "kv_cache_memory_bytes": None if engine.kv_cache_mib is None else engine.kv_cache_mib << 20,
            "block_size": engine.block_size,
            "tensor_parallel_size": engine.tensor_parallel,
            "pipeline_parallel_size": engine.pipeline_parallel,
            "enable_expert_parallel": engine.expert_parallel,
            "enforce_eager": engine.eager,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
            "worker_extension_cls": "rollout_fleet.weights.worker_extension.WorkerExtension",
            "enable_return_routed_experts": self._config.learner.moe.replay_routing,
        }
        if on_cpu:
            arguments["distributed_executor_backend"] = "uni" if engine.devices == 1 else "mp"
            if arguments["dtype"] == "float32":  # vLLM chooses AMX_MLA where the CPU has AMX; it has no float32
                arguments["attention_backend"] = "CPU_MLA"  # without latent attention nothing changes
        else:
            arguments["moe_backend"] = "triton"  # others reorder the experts when loaded: no updates in place, no proof
            # The first would compile every feature of the samplers, used or not, at the first start on a machine.
            # The second would try ways of FlashInfer's products, which bfloat16 and Triton's experts do not use.
            arguments["kernel_config"] = {"enable_jit_warmup": False, "enable_flashinfer_autotune": False}
            if engine.kv_cache_mib is not None:  # vLLM would still refuse to start with less than the share free
                arguments["gpu_memory_utilization"] = LEAST_SHARE
        if self._profiles is not None:
            arguments["profiler_config"] = profiler_config(self._profiles)
        return arguments | engine.extra


def import_ahead(config: Config, model: Path | None = None) -> None:
    """Import vLLM once for this process and its engine's, before the process has threads; on a CPU only.

    `model` is the folder that the engine will load; None: the config's.
    """
    if prepare_environment(config):
        engine_start.import_ahead(model or Path(config.model.path), config.rollout.engine.devices > 1)


def prepare_environment(config: Config) -> bool:
    """Set what vLLM and its libraries read once, at import; returns whether this engine runs on the CPU."""
    # Without it the engine's OpenMP threads spin against the front process: 13 times slower on two cores.
    os.environ["OMP_NUM_THREADS"] = str(config.rollout.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a local folder; nothing may be fetched behind our back
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    socket_folder.shorten()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # vLLM forks by default. A forked child cannot use CUDA once its parent has asked the driver for devices, as the
    # question below does without NVML.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML and nvidia-smi count
    import torch

    if torch.cuda.is_available():
        # FlashInfer's samplers give no log-probabilities, so none would be used. vLLM would import and compile it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        if config.model.dtype == "float32":
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # attention would multiply with 10 bits of mantissa
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


@lru_cache(maxsize=4096)
def _sampling_params(
    max_tokens: int, temperature: float, top_p: float, *, seed: int | None, stop_token_ids: tuple[int, ...]
) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        ignore_eos=True,  # the end tokens are ours to say, whatever the folder has
        stop_token_ids=list(stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a shallow copy per request: nothing in it is changed afterwards
    )


def to_generation(output: Any, moe_layers: list[int] | None = None) -> Generation:
    """vLLM's final RequestOutput in our terms; raises SlipstreamError when a token lacks one of its figures."""
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    logprobs = completion.logprobs.logprobs if completion.logprobs is not None else []
    if len(logprobs) != len(tokens):
        raise SlipstreamError(f"the engine gave {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    runs: list[VersionRun] = []
    for span in completion.weight_versions or []:
        version = -1 if span.version == UNLABELLED else int(span.version.rpartition(":")[2])
        if span.end > span.start and (not runs or runs[-1].version != version):
            runs.append(VersionRun(span.start, version))
    if tokens and not runs:
        raise SlipstreamError("the engine gave tokens without a policy version")
    reason: FinishReason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
    routed = None if moe_layers is None else _routing(output, moe_layers)
    return Generation(tokens, list(logprobs), runs, reason, routed)


def _routing(output: Any, moe_layers: list[int]) -> np.ndarray | None:
    """[prompt + N - 1, MoE layers, experts per token] int16; None of an aborted request that has none."""
    completion = output.outputs[0]
    experts = completion.routed_experts
    if experts is None and completion.finish_reason not in ("stop", "length"):
        return None
    fed = len(output.prompt_token_ids) + len(completion.token_ids) - 1
    got = 0 if experts is None else len(experts)
    if got != fed:
        raise SlipstreamError(f"the engine gave the experts of {got} tokens, {fed} were fed")
    return None if experts is None else experts[:, moe_layers].astype(np.int16)


def end_tokens(folder: Path) -> list[int]:
    """End-of-sequence ids of a Hugging Face folder: generation_config.json's, else config.json's; raises UsageError."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise UsageError(f"{path}: not JSON: {error}") from error
        if found is not None:
            return [int(x) for x in found] if isinstance(found, list) else [int(found)]
    if not (folder / "config.json").is_file():
        raise UsageError(f"model.path: {folder} has no config.json; it must be a Hugging Face model folder")
    return []


def profiler_config(folder: Path) -> dict[str, Any]:
    """vLLM's profiler_config of an engine that writes profiles into `folder`; nothing is recorded before it is told."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.absolute()),
        "torch_profiler_with_stack": False,  # many times the size
        "torch_profiler_with_memory": True,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "max_iterations": MOST_PROFILED_STEPS,
    }


async def record_profiles(engine: Engine, feed: WeightClient, telemetry: TelemetryConfig, node_id: str) -> None:
    """Profile each chosen version from its flip to the end of the next one. Failures are logged."""
    left = set(telemetry.profile_steps)
    try:
        while left:
            version = feed.state.version
            if version in left:
                left.remove(version)
                try:
                    await engine.profile(f"rollout-{re.sub('[^A-Za-z0-9._-]', '-', node_id)[:96]}-step-{version}")
                    while feed.state.version == version:
                        await feed.wait_change(PROFILE_LOOK_S)
                finally:
                    await engine.profile(None)
            else:
                await feed.wait_change(PROFILE_LOOK_S)
    except Exception:
        logger.warning("this node records no more profiles", exc_info=True)
