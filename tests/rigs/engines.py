"""A real vLLM engine fed by a real publisher, for tests: one engine, one event loop in a thread of its own."""

import asyncio
import copy
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from common.config.schema import (
    Config,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    MoeConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
    WeightsConfig,
)
from common.errors import SlipstreamError
from common.weights.receive.weight_client import WeightClient
from common.weights.source.publisher import WeightPublisher
from common.weights.wire.messages import Canary
from rollout_fleet.engine.engine import Engine, prepare_environment
from rollout_fleet.episode.sampler_protocol import Generation
from rollout_fleet.vllm_patches.engine_start import register_models
from tests.rigs import device, warm_engines
from tests.rigs.waiting import LIMIT_S, until_async

T = TypeVar("T")
VOCABULARY = 100  # not a multiple of 64: vLLM pads the embedding
END = 1
BLOCK = 128  # tokens, which is vLLM's own choice on a CPU only
TOLERANCE = 3e-5 * device.LOOSE  # log-probabilities in float32 differ by less
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=512, initializer_range=0.15, eos_token_id=END, pad_token_id=0, bos_token_id=2,
)  # fmt: skip


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Tiny Qwen3 with tied embeddings; different seeds disagree by nats."""
    torch.manual_seed(seed)
    config = Qwen3Config(**SHAPE, num_hidden_layers=2, intermediate_size=128, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def nudged(model: Any) -> Any:
    """The model after a small step: one element in fifty of every tensor moves."""
    after = copy.deepcopy(model)
    for parameter in after.parameters():
        parameter.data.view(-1)[::50] *= 1.001
    return after


def exported(model: Any) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) as in a Hugging Face folder and the learner's export: the tied head once, experts one by one."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sorted(load_file(Path(folder) / "model.safetensors").items())


def logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """[len(tokens) - 1] of tokens[1:]."""
    ids = torch.tensor([tokens])
    rows = (model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
    return rows.gather(-1, ids[0, 1:, None])[:, 0].tolist()


def job(folder: Path) -> Config:
    return Config(
        run=RunConfig(name="test", dir=str(folder / "run"), steps=1),
        model=ModelConfig(path=str(folder / "model"), dtype="float32"),
        tasks=TasksConfig(environment="none", dataset="none"),
        rollout=RolloutConfig(
            concurrency="auto",  # so that the engine says how full its cache is
            engine=EngineConfig(max_model_len=512, max_num_seqs=64, kv_cache_mib=16, eager=True, block_size=BLOCK),
        ),
        weights=WeightsConfig(bucket_mib=1),
    )


def prompt(i: int) -> list[int]:
    return [(i * 7 + j * 3) % 90 + 4 for j in range(12)]


def worst(got: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


@contextmanager
def platform_as_on_cuda() -> Iterator[None]:
    """Within, vLLM's CPU platform forces neither spawn nor synchronous scheduling: vLLM's own choices stay."""
    from vllm.platforms.cpu import CpuPlatform

    forcing, name = CpuPlatform.__dict__["check_and_update_config"], "VLLM_WORKER_MULTIPROC_METHOD"

    def update(platform: Any, config: Any) -> None:
        chosen, method = config.scheduler_config.async_scheduling, os.environ.get(name)
        forcing.__func__(platform, config)
        config.scheduler_config.async_scheduling = chosen
        del os.environ[name]
        os.environ.update({} if method is None else {name: method})

    CpuPlatform.check_and_update_config = classmethod(update)  # type: ignore[assignment]
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = forcing


class RigEngine(Engine):
    """The engine whose worker can also be told to damage what it loads. On a CPU its processes are forks."""

    extension = "engine_extension.DamagingExtension"

    def _create(self) -> Any:
        with nullcontext() if device.CUDA else warm_engines.forking(self._config.rollout.engine.devices > 1):
            return super()._create()

    def _arguments(self, on_cpu: bool) -> dict[str, Any]:
        return {**super()._arguments(on_cpu), "worker_extension_cls": f"tests.rigs.{self.extension}"}

    @contextmanager
    def stopping_at(self, *tokens: int) -> Iterator[None]:
        """Meanwhile these tokens end a generation; without any, each runs to its last token."""
        usual, self.stop_token_ids = self.stop_token_ids, list(tokens)
        yield
        self.stop_token_ids = usual

    @contextmanager
    def keeping_episodes(self) -> Iterator[None]:
        """Meanwhile weights.kv_cache is keep_episode."""
        usual = self._config
        weights = msgspec.structs.replace(usual.weights, kv_cache="keep_episode")
        self._config = msgspec.structs.replace(usual, weights=weights)
        yield
        self._config = usual

    async def allocate_stage_inputs(self) -> None:
        await self._llm.collective_rpc("allocate_stage_input")

    async def damage_next_load(self, part: str) -> None:
        await self._llm.collective_rpc("damage_next_load", args=(part,))

    async def parameter_bytes(self) -> int:
        return sum(await self._llm.collective_rpc("parameter_bytes"))

    async def spoil_decoding(self) -> None:
        await self._llm.collective_rpc("spoil_decoding")

    async def damage_next_bucket(self, number: int) -> None:
        await self._llm.collective_rpc("damage_next_bucket", args=(number,))

    async def told(self, *names: str) -> tuple[str, int, list[str | None]]:
        """Name of the scheduler, batches in flight, and what the engine's process has under these variables."""
        return tuple(await self._llm.engine_core.call_utility_async("slipstream_told", list(names)))

    @property
    def llm(self) -> Any:
        """vLLM's own engine."""
        return self._llm

    async def shutdown(self) -> None:
        """The engine's own, with a look at what vLLM does and leaves meanwhile."""
        llm = self._llm
        if llm is not None:
            end = llm.shutdown

            def watched(timeout: float | None = None) -> None:  # `__del__` calls it without, if an end has failed
                listens = llm.output_handler is not None and not llm.output_handler.done()
                assert not listens, "it would hear of the end of the process and log that the engine died"
                end(timeout=timeout)

            llm.shutdown = watched
        await super().shutdown()
        assert llm is None or llm.engine_core.resources.ctx.closed, "vLLM would leave it to the garbage collector"


class CudaScheduleEngine(RigEngine):
    """The same, started and scheduled as on CUDA, where the engine's process is spawned."""

    extension = "cuda_schedule_extension.CudaScheduleExtension"

    def _create(self) -> Any:
        with platform_as_on_cuda():
            return Engine._create(self)


class GraphEngine(RigEngine):
    """The same, whose decoding is captured in CUDA graphs: they have the addresses of the parameters."""

    def _arguments(self, on_cpu: bool) -> dict[str, Any]:
        captured = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # nothing is compiled, which takes minutes
        return {**super()._arguments(on_cpu), "enforce_eager": False, "compilation_config": captured}


class EngineRig:
    """`engine`: keys of rollout.engine."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[int], Any] = make_model,
        moe: MoeConfig | None = None,
        kind: type[RigEngine] = RigEngine,
        **engine: Any,
    ) -> None:
        first = make(0)
        config = first.config
        config.architectures = [type(first).__name__]
        config.save_pretrained(folder / "model")
        self.config = job(folder)
        if moe is not None:
            self.config = msgspec.structs.replace(self.config, learner=LearnerConfig(moe=moe))
        rollout = self.config.rollout
        changed = msgspec.structs.replace(rollout.engine, **engine)
        self.config = msgspec.structs.replace(self.config, rollout=msgspec.structs.replace(rollout, engine=changed))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = kind(self.config)
        if prepare_environment(self.config):
            register_models(config.architectures)
        self.make, self.models = make, {}
        self.run(self.engine.start(), 2 * LIMIT_S)
        self.publisher = WeightPublisher(
            0, "float32", WeightsConfig(timeout_s=60.0, encoding="delta", anchor_every=0), bucket_bytes=16 << 10
        )
        self.address = self.publisher.start()  # last: when the engine does not start, no thread of it is left
        self.client = self.run(self._client())

    async def _client(self) -> WeightClient:
        client = WeightClient("rig", self.engine.weights)
        client.follow(self.address, 0)
        return client

    @property
    def core(self) -> psutil.Process:
        """The engine's process."""
        ended = psutil.STATUS_ZOMBIE  # those of earlier engines, which Python reaps when it starts the next process
        living = [child for child in psutil.Process().children(recursive=True) if child.status() != ended]
        (found,) = [child for child in living if "EngineCore" in "".join(child.cmdline())]
        return found

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = LIMIT_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def publish(self, version: int, canary: Canary | None = None, model: Any = None) -> None:
        """Version v is the model of seed v, or `model`."""
        self.models[version] = self.make(version) if model is None else model
        self.publisher.publish(version, exported(self.models[version]), canary)

    def put(self, version: int, canary: Canary | None = None, model: Any = None) -> None:
        """Publish, and wait until the engine runs it or is excluded."""
        self.publish(version, canary, model)
        self.run(self.active(version))

    async def put_async(self, version: int) -> None:
        """`put`, from within the rig's loop."""
        await asyncio.to_thread(self.publish, version)
        await self.active(version)

    def put_first(self) -> None:
        """Put version 1, whose canary has to agree."""
        tokens = [(i * 11) % 90 + 4 for i in range(32)]
        self.put(1, Canary(tokens, logprobs(self.make(1), tokens), tolerance=1e-4 * device.LOOSE))
        state = self.client.state
        assert state.excluded is None and state.version == self.engine.weights.version == 1
        assert 0 < state.canary_max_difference < 1e-4 * device.LOOSE

    def samples_with(self, version: int) -> Generation:
        """See prompts continued with this version's weights; returns what came for `prompt(0)`."""

        async def together() -> list[Generation]:
            return await asyncio.gather(*(self.engine.generate(prompt(i), 40) for i in range(4)))

        done = self.run(together())
        for i, got in enumerate(done):
            assert [run.version for run in got.version_runs] == [version]
            assert worst(got.logprobs, logprobs(self.models[version], prompt(i) + got.tokens)[11:]) < TOLERANCE
        return done[0]

    def flip_in_flight(self, version: int, requests: int, tokens: int) -> list[Generation]:
        """Generations of `prompt(0)`, ..., with a flip to `version` while all of them are being sampled."""

        async def across() -> list[Generation]:
            tasks = [asyncio.create_task(self.engine.generate(prompt(i), tokens)) for i in range(requests)]
            await self.sampling(requests)
            await self.put_async(version)
            return await asyncio.gather(*tasks)

        with self.engine.stopping_at():
            return self.run(across())

    def put_damaged(self, version: int, part: str) -> None:
        """Put a version; one element is loaded wrongly, into a parameter that is named like `part`."""
        self.run(self.engine.damage_next_load(part))
        self.put(version)

    def is_excluded(self, version: int, reason: str) -> None:
        """See that the engine was stopped for `reason`; the node still says that it has `version`."""
        state = self.client.state
        assert reason in (state.excluded or "") and state.version == version
        with pytest.raises(SlipstreamError) as refused:
            self.run(self.engine.generate([5, 6], 4))
        assert "excluded" in str(refused.value)

    async def sampling(self, requests: int) -> None:
        """Wait until the engine samples so many requests at once."""
        await until_async(lambda: self.engine.counters.running >= requests, f"{requests} requests in the engine")

    async def active(self, version: int) -> None:
        while self.client.state.version != version and self.client.state.excluded is None:
            await self.client.wait_change(1)

    def close(self) -> None:
        self.run(self.client.close())
        self.publisher.close()
        self.run(self.engine.shutdown())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(LIMIT_S)
        self.loop.close()
        del self.engine, self.client, self.publisher
        gc.collect()  # a file left open warns here, near its test
