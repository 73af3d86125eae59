"""The weights of a running engine: staged, flipped and proven over vLLM's weight-transfer calls."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from common.errors import SlipstreamError
from common.weights.receive.contract import CanaryRead, Flip, Watch
from common.weights.receive.receiver import StagingStatus
from common.weights.receive.weight_client import next_poll_s, until_staged
from common.weights.wire.failures import FailureKind, ProofFailed, StagingFailed
from common.weights.wire.layout import PATIENCE, publish_bound
from rollout_fleet.vllm_patches.engine_process import CANARY, salt
from rollout_fleet.weights.weight_proof import Proof, whole_checksum

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT_S = 120.0  # least bound on a flip, its proof and other calls: an engine that hangs is given up
CANARY_TIMEOUT_S = 1800.0  # bound on a canary that waits for room in an engine whose workers answer
PAUSE_TIMEOUT_S = 10.0
DECODED = 8  # tokens that a canary decodes; the first of them comes from prefill
T = TypeVar("T")
UNLABELLED = "default"  # vLLM's label before the first version


class EngineWeights:
    """The WeightTarget of a vLLM engine. `check_usable` and `wait_proven` are called by requests."""

    def __init__(self, recompute: bool) -> None:
        """`recompute`: drop the KV cache at a flip, so that every later token is of the new policy alone."""
        self.recompute = recompute
        self._llm: Any = None
        self._pause_first = False
        self._rounded = False
        self._usable = False
        self._broken: str | None = None
        self._proven = asyncio.Event()
        self._proven.set()
        self._unproven_version = -1
        self._one_flip = asyncio.Lock()
        self._flipping: asyncio.Future[Flip] | None = None
        self.version = -1
        self.incarnation = -1
        self._total_bytes = 0  # the size of the newest staged version
        self._slowest_s = 0.0  # the longest time of a flip, a proof or another call so far
        self.half_flips = 0  # flips that began and flips that ended: odd while one is under way

    @property
    def label(self) -> str:
        """vLLM's label of these weights, which requests are salted with: a KV block is of one version's requests."""
        return UNLABELLED if self.version < 0 else f"{self.incarnation}:{self.version}"

    async def attach(self, llm: Any, usable: bool, rounded: bool = False) -> None:
        """The engine is up; `usable`: its weights may be sampled from as they are; `rounded`: in 8 bits."""
        self._llm = llm
        self._usable = usable
        config = llm.vllm_config
        self._rounded = rounded
        # With batches in flight a label would be one step off: those engines are paused around the flip.
        self._pause_first = config.scheduler_config.async_scheduling or config.max_concurrent_batches > 1

    def detach(self) -> None:
        """The engine goes away; calls that wait for a proof fail."""
        self._llm = None
        self._broken = self._broken or "the engine was shut down"
        self._proven.set()

    def check_usable(self) -> None:
        """Raises SlipstreamError when these weights must not be sampled from."""
        if self._broken is not None:
            raise SlipstreamError(self._broken)
        if not self._usable:
            raise SlipstreamError("the engine has no weights yet; they come from the learner")

    async def wait_proven(self, versions: Iterable[int]) -> None:
        """Return once the weights behind `versions` are proven; raises SlipstreamError when they are not."""
        if not self._proven.is_set() and self._unproven_version in versions:
            await self._proven.wait()
        if self._broken is not None:
            raise SlipstreamError(self._broken)

    async def tell(self, message: bytes, node_id: str) -> bytes:
        if self._flipping is not None:  # its caller may have left, but it still needs the buffer
            await asyncio.wait([self._flipping])
        handed = self._rpc("slipstream_handle", message=message, node_id=node_id)
        return (await self._answered(handed, "a message to the workers"))[0]

    async def stage(self, publish: bytes, watch: Watch) -> float:
        """As WeightTarget.stage; raises ProofFailed when the engine hangs."""

        async def status() -> StagingStatus:
            first, *_ = await self._answered(self._rpc("slipstream_staging"), "staging")
            found = msgspec.msgpack.decode(first, type=StagingStatus)
            self._total_bytes = found.total_bytes
            return found

        try:
            await self.tell(publish, "")
            return await until_staged(status, watch)
        except SlipstreamError as error:
            raise StagingFailed(str(error), FailureKind.ENGINE) from error

    async def flip(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        """Use the staged version from the next token on, then prove it. Raises ProofFailed.

        A cancelled call (the node turns to a restarted learner) lets the flip finish by itself.
        """
        self._flipping = asyncio.ensure_future(self._flip_and_prove(incarnation, version, expected_checksum))
        return await asyncio.shield(self._flipping)

    async def _flip_and_prove(self, incarnation: int, version: int, expected_checksum: str) -> Flip:
        async with self._one_flip:
            self._unproven_version = version
            self._proven.clear()
            try:
                stall_s = await self._answered(self._flip(incarnation, version), f"flip to version {version}")
                self.incarnation = incarnation
                self.version = version
                self._usable = True
                checksum = await self._answered(self._proof(incarnation, version), f"proof of version {version}")
                if checksum != expected_checksum:
                    differs = f"the engine has checksum {checksum}, published was {expected_checksum}"
                    raise ProofFailed(f"version {version}: {differs}")
            except BaseException as error:
                await self.exclude(str(error) or type(error).__name__)
                raise
            self._proven.set()
            return Flip(stall_s, checksum)

    async def canary(self, tokens: list[int]) -> CanaryRead:
        """Read the canary `tokens` at temperature 1; raises ProofFailed on a hang, and after CANARY_TIMEOUT_S.

        The learner knows what prefill gives. Decoding may compute with other tensors, as in latent attention. So the
        engine continues a beginning token by token, and prefill must give these tokens the same values.
        """
        beginning = tokens[: max(1, len(tokens) - DECODED)]
        (known, _), (_, decoded) = await asyncio.gather(self._score(tokens, 1), self._score(beginning, DECODED))
        again, _ = await self._score(beginning + [token for token, _ in decoded], 1)
        pairs = zip((logprob for _, logprob in decoded), again[-DECODED:], strict=True)
        return CanaryRead(known, [one - other for one, other in pairs], self._rounded)

    async def _score(self, tokens: list[int], continued: int) -> tuple[list[float], list[tuple[int, float]]]:
        """Log-probabilities of `tokens[1:]` by prefill, and (token, log-probability) of what greedy decoding adds."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        final = RequestOutputKind.FINAL_ONLY
        counts = {"max_tokens": continued, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True}
        params = SamplingParams(temperature=0.0, detokenize=False, output_kind=final, **counts)
        request_id = f"{CANARY}{self.label}-{time.monotonic_ns()}"
        prompt = {"type": "token", "prompt_token_ids": tokens, "cache_salt": salt(self.label, request_id)}

        async def finished() -> Any:
            return [output async for output in self._llm.generate(prompt, params, request_id)][-1]

        output = await self._admitted(finished())
        added = output.outputs[0]
        known = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
        return known, [(token, row[token].logprob) for token, row in zip(added.token_ids, added.logprobs, strict=True)]

    async def exclude(self, reason: str) -> None:
        """Generate nothing any more: the engine is paused and every request ends with the reason."""
        if self._broken is None:
            self._broken = f"excluded: {reason}"
        self._proven.set()
        if self._llm is not None:
            try:
                async with asyncio.timeout(PAUSE_TIMEOUT_S):
                    await self._llm.engine_core.pause_scheduler_async(mode="abort", clear_cache=False)
            except TimeoutError:
                logger.warning("the engine does not even pause; nothing that it samples is used")

    async def _flip(self, incarnation: int, version: int) -> float:
        """Seconds that generation stood still, as the engine or (paused around it) this process measured them."""
        core = self._llm.engine_core
        self.half_flips += 1
        try:
            started = time.perf_counter()
            if self._pause_first:
                await core.pause_scheduler_async(mode="keep", clear_cache=False)
            stall_s = await core.call_utility_async("slipstream_flip", incarnation, version, self.recompute)
            if self._pause_first:
                await core.resume_scheduler_async()
            return time.perf_counter() - started if self._pause_first else stall_s
        finally:
            self.half_flips += 1

    async def _proof(self, incarnation: int, version: int) -> str:
        """Checksum of the engine's parameters; the worker computes it while generation continues."""
        started = time.perf_counter()
        while True:
            found = await self._rpc("slipstream_proof")
            proofs = [msgspec.msgpack.decode(one, type=Proof | None) for one in found]
            proven = [proof for proof in proofs if proof is not None]
            for proof in proven:
                if proof.error or (proof.incarnation, proof.version) != (incarnation, version):
                    told = proof.error or f"the engine proved version {proof.version}, not {version}"
                    raise ProofFailed(told)
            if len(proven) == len(proofs):
                return whole_checksum(proven)
            await asyncio.sleep(next_poll_s(time.perf_counter() - started, 0.0))  # each question enters an engine step

    def _bound_s(self) -> float:
        """It follows from the size of a version, and from what earlier ones took."""
        return publish_bound(max(ENGINE_TIMEOUT_S, PATIENCE * self._slowest_s), self._total_bytes)

    async def _answered(self, work: Awaitable[T], what: str) -> T:
        """The result of `work`; ProofFailed when the engine does not answer in time."""
        bound_s = self._bound_s()
        began = time.perf_counter()
        try:
            async with asyncio.timeout(bound_s):
                answer = await work
        except TimeoutError:
            late = f"{what}: the engine did not answer within {bound_s:g} s"
            raise ProofFailed(late, FailureKind.ENGINE) from None
        self._slowest_s = max(self._slowest_s, time.perf_counter() - began)
        return answer

    async def _admitted(self, canary: Coroutine[Any, Any, T]) -> T:
        """The result of `canary`, which may wait until running requests leave room; as long as the workers answer."""
        began = time.perf_counter()
        reading = asyncio.create_task(canary)
        try:
            while not (await asyncio.wait([reading], timeout=self._bound_s()))[0]:
                waited_s = time.perf_counter() - began
                if waited_s > CANARY_TIMEOUT_S:
                    late = f"canary: the engine did not read it within {waited_s:.0f} s"
                    raise ProofFailed(late, FailureKind.ENGINE)
                await self._answered(self._rpc("slipstream_staging"), "canary")
            return await reading
        finally:
            reading.cancel()

    async def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Every worker's answer, by rank; raises SlipstreamError with the reason of whichever failed."""
        if self._llm is None:
            raise SlipstreamError("the engine is not running")
        try:
            return await self._llm.collective_rpc(method, kwargs=arguments)
        except Exception as error:  # vLLM hands worker errors on as bare Exception
            raise SlipstreamError(f"{method}: {error}") from error
