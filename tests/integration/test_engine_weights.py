"""The real vLLM engine, fed over the real weight plane, against Hugging Face in float32; and an agent that talks to it.

One engine serves the whole file, then another one, which starts and schedules as on CUDA. Its platform does not force
spawn, and it has vLLM's asynchronous scheduler with two batches in flight. With CUDA both have that, and the second one
has CUDA graphs. Tests run in order and the last one breaks the engine.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import SlipstreamError
from common.weights.receive.contract import CanaryRead, Flip, Watch
from common.weights.receive.weight_client import WeightClient
from common.weights.wire import messages
from common.weights.wire.failures import FailureKind, ProofFailed, StagingFailed
from launch.quickstart.assets import build_tokenizer
from rollout_fleet.agents.driver import AgentDriver
from rollout_fleet.engine import engine
from rollout_fleet.environments.isolation.thread_backend import EnvironmentThread, ThreadBackend
from rollout_fleet.environments.protocol import Budget
from rollout_fleet.episode.driver import EpisodeRules, Sampling
from rollout_fleet.episode.rendering import Renderer
from rollout_fleet.episode.sampler_protocol import Generation, Session
from rollout_fleet.weights import engine_weights
from tests.rigs.device import CUDA
from tests.rigs.engines import (
    TOLERANCE,
    CudaScheduleEngine,
    EngineRig,
    GraphEngine,
    RigEngine,
    exported,
    logprobs,
    make_model,
    nudged,
    prompt,
    worst,
)
from tests.rigs.waiting import until, until_async
from tests.rigs.weight_processes import BufferTarget

REQUESTS, TOKENS = 24, 400


KINDS = {"": RigEngine, **({"CUDA graphs": GraphEngine} if CUDA else {"as on CUDA": CudaScheduleEngine})}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    made = EngineRig(tmp_path_factory.mktemp("engine"), kind=request.param)
    yield made
    made.close()


def batches_in_flight(rig: EngineRig) -> bool:
    """Whether this engine schedules as on CUDA."""
    return CUDA or isinstance(rig.engine, CudaScheduleEngine)


def boundary(generation: Generation, old: int, new: int) -> int:
    """Index of the first token of the new version."""
    versions = [run.version for run in generation.version_runs]
    assert versions == [old, new], "the flip came after the end of a request"
    return generation.version_runs[1].start


def test_an_engine_is_spawned_and_asks_nvml_for_devices_whatever_its_platform_forces(rig: EngineRig) -> None:
    scheduler, _, variables = rig.run(rig.engine.told("VLLM_WORKER_MULTIPROC_METHOD", "PYTORCH_NVML_BASED_CUDA_CHECK"))
    assert variables == ["spawn", "1"]
    assert scheduler == ("AsyncScheduler" if batches_in_flight(rig) else "Scheduler")


def test_nothing_is_sampled_before_weights_came(rig: EngineRig) -> None:
    with pytest.raises(SlipstreamError) as refused:
        rig.run(rig.engine.generate([5, 6], 4))
    assert "no weights" in str(refused.value)


def test_the_first_version_is_proven_and_its_canary_agrees(rig: EngineRig) -> None:
    rig.put_first()


def test_the_engine_itself_refuses_a_flip_among_batches_in_flight(rig: EngineRig) -> None:
    """EngineWeights pauses such an engine first. One without a queue has nothing in flight between two steps."""

    async def asked() -> tuple[int, Generation]:
        task = asyncio.create_task(rig.engine.generate(prompt(0), TOKENS))
        await rig.sampling(1)
        _, in_flight, _ = await rig.engine.told()
        if in_flight:
            with pytest.raises(Exception, match="in flight"):  # vLLM's own class
                await rig.engine.llm.engine_core.call_utility_async("slipstream_flip", 0, 2, False)
        return in_flight, await task

    with rig.engine.stopping_at():
        in_flight, generated = rig.run(asked())
    assert in_flight == batches_in_flight(rig)
    assert [run.version for run in generated.version_runs] == [1]
    assert worst(generated.logprobs, logprobs(rig.models[1], prompt(0) + generated.tokens)[11:]) < TOLERANCE


class Newcomer(BufferTarget):
    """A node without an engine, whose canary is version 1's, and where it fetched from."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []

    async def tell(self, message: bytes, node_id: str) -> bytes:
        told = messages.decode_from_learner(message)
        self.sources += told.sources if isinstance(told, messages.Publish) else ()
        self.sources += [told.source] if isinstance(told, messages.Reroute) else ()
        return await super().tell(message, node_id)

    async def canary(self, tokens: list[int]) -> CanaryRead:
        return CanaryRead(logprobs(make_model(1), tokens), [])


def test_a_newcomer_fetches_the_version_from_the_engine_while_it_generates(rig: EngineRig) -> None:
    target = Newcomer()

    async def joined() -> Generation:
        generating = asyncio.create_task(rig.engine.generate(prompt(1), TOKENS))
        await rig.sampling(1)
        newcomer = WeightClient("newcomer", target)
        newcomer.follow(rig.address, 0)
        await until_async(lambda: newcomer.state.version == 1, "the newcomer's weights")
        await newcomer.close()
        return await generating

    with rig.engine.stopping_at():
        generated = rig.run(joined())
    target.receiver.close()
    listening = {f"tcp://{c.laddr.ip}:{c.laddr.port}" for c in rig.core.net_connections("tcp") if c.status == "LISTEN"}
    assert len(target.sources) == 1 and target.sources[0] in listening, "the engine served it, not the learner"
    assert len(generated.tokens) == TOKENS
    assert [run.version for run in generated.version_runs] == [1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
def test_logprobs_are_of_the_distribution_sampled_from(rig: EngineRig, temperature: float, top_p: float) -> None:
    got = rig.run(rig.engine.generate(prompt(3), 40, temperature, top_p))
    rows = rig.models[1](torch.tensor([prompt(3) + got.tokens])).logits[0, 11:-1].float() / temperature
    if top_p < 1:
        ordered, index = rows.sort(-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        rows = torch.empty_like(rows).scatter_(-1, index, ordered.masked_fill(dropped, float("-inf")))
    expected = rows.log_softmax(-1).gather(-1, torch.tensor(got.tokens)[:, None])[:, 0].tolist()
    assert worst(got.logprobs, expected) < TOLERANCE


def test_greedy_follows_hugging_face_and_an_end_token_is_the_last(rig: EngineRig) -> None:
    model, tokens = rig.models[1], prompt(5)
    for _ in range(20):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert rig.run(rig.engine.generate(prompt(5), 20, temperature=0)).tokens == tokens[12:]

    with rig.engine.stopping_at(tokens[14]):
        stopped = rig.run(rig.engine.generate(prompt(5), 20, temperature=0))
    assert stopped.finish_reason == "stop" and stopped.tokens == tokens[12 : 12 + tokens[12:].index(tokens[14]) + 1]


def test_a_flip_in_flight_labels_every_token_when_the_cache_is_kept(rig: EngineRig) -> None:
    done = rig.flip_in_flight(2, REQUESTS, TOKENS)
    for i, got in enumerate(done):
        b = boundary(got, 1, 2)
        whole = prompt(i) + got.tokens
        old = logprobs(rig.models[1], whole)[11:]
        assert worst(got.logprobs[:b], old[:b]) < TOLERANCE
        # The new side: new weights over the old weights' keys and values.
        seen = 12 + b - 1  # the forward pass that sampled token b read token b - 1
        cache = rig.models[1](torch.tensor([whole[:seen]]), use_cache=True).past_key_values
        rows = rig.models[2](torch.tensor([whole[seen:-1]]), past_key_values=cache).logits[0].float().log_softmax(-1)
        new = rows.gather(-1, torch.tensor(got.tokens[b:])[:, None])[:, 0].tolist()
        assert worst(got.logprobs[b:], new) < TOLERANCE
        assert worst(got.logprobs[b:], old[b:]) > 0.1, "the versions differ enough to be told apart"


def test_a_flip_in_flight_is_of_the_new_policy_alone_when_the_cache_is_recomputed(rig: EngineRig) -> None:
    rig.engine.weights.recompute = True
    done = rig.flip_in_flight(3, REQUESTS, TOKENS)
    rig.engine.weights.recompute = False
    assert rig.engine.counters.preemptions == 0, "it is not for want of KV cache"
    for i, got in enumerate(done):
        b = boundary(got, 2, 3)
        whole = prompt(i) + got.tokens
        assert worst(got.logprobs[:b], logprobs(rig.models[2], whole)[11 : 11 + b]) < TOLERANCE
        assert worst(got.logprobs[b:], logprobs(rig.models[3], whole)[11 + b :]) < TOLERANCE


LONG = [(i * 13) % 90 + 4 for i in range(300)]  # more than two cache blocks


def hits(rig: EngineRig) -> tuple[int, Generation]:
    """(prompt tokens that the prefix cache had, what came) of LONG."""
    before = rig.engine.counters.cached_tokens
    got = rig.run(rig.engine.generate(LONG, 8, temperature=0))
    return rig.engine.counters.cached_tokens - before, got


def test_a_prefix_is_shared_within_a_version_and_never_across_a_flip(rig: EngineRig) -> None:
    assert hits(rig)[0] == 0
    assert hits(rig)[0] >= 256, "the second request of a version finds the blocks of the first"
    rig.put(4)
    cached, got = hits(rig)
    assert cached == 0, "the first request after the flip finds nothing"
    assert worst(got.logprobs, logprobs(rig.models[4], LONG + got.tokens)[299:]) < TOLERANCE
    assert hits(rig)[0] >= 256


def test_samples_of_a_group_that_start_together_compute_their_prompt_once(rig: EngineRig) -> None:
    task = [(i * 17) % 90 + 4 for i in range(300)]
    before = rig.engine.counters.cached_tokens

    async def group() -> list[Generation]:
        return await asyncio.gather(*(rig.engine.generate(task, 8) for _ in range(8)))

    rig.run(group())
    assert rig.engine.counters.cached_tokens - before >= 7 * 256


def test_preempted_requests_sampled_tokens_and_the_use_of_the_cache_are_counted_while_they_run(rig: EngineRig) -> None:
    """128 blocks of 128 tokens for 64 requests of four each: half of them lose theirs."""
    assert rig.engine.counters.preemptions == 0
    assert rig.engine.holds == 128 * 128 // 512
    counters, sampled = rig.engine.counters, []

    async def pressed() -> None:
        before = counters.tokens_sampled
        tasks = [asyncio.create_task(rig.engine.generate(prompt(i), TOKENS - i)) for i in range(64)]
        await until_async(lambda: counters.preemptions)
        assert 0.5 < counters.kv_cache_usage <= 1
        assert not all(task.done() for task in tasks)
        sampled.append(counters.tokens_sampled - before)
        await asyncio.gather(*tasks)
        sampled.append(counters.tokens_sampled - before)

    with rig.engine.stopping_at():
        rig.run(pressed())
    early = sampled[1] - sum(TOKENS - i for i in range(64))
    assert 64 * 128 < sampled[0] < sampled[1] and 0 <= early <= 64 * batches_in_flight(rig)
    assert counters.tokens_recomputed >= 128 * counters.preemptions
    assert counters.recompute_s != 0  # negative where a busy machine made the usual steps the slow ones


def turn(rig: EngineRig, context: list[int], session: Session, tokens: int = 8) -> tuple[int, Generation]:
    """(tokens of `context` that the prefix cache had, what came)."""
    before = rig.engine.counters.cached_tokens
    got = rig.run(rig.engine.generate(context, tokens, temperature=0, session=session))
    return rig.engine.counters.cached_tokens - before, got


def over_blocks(rig: EngineRig, old: int, new: int, context: list[int], got: Generation, *, blocks: int) -> list[float]:
    """Hugging Face's log-probabilities of `got` by `new`, over so many blocks of keys and values by version `old`."""
    whole, seen = context + got.tokens, 128 * blocks
    cache = rig.models[old](torch.tensor([whole[:seen]]), use_cache=True).past_key_values
    rows = rig.models[new](torch.tensor([whole[seen:-1]]), past_key_values=cache).logits[0].float().log_softmax(-1)
    return rows.gather(-1, torch.tensor(whole[seen + 1 :])[:, None])[len(context) - seen - 1 :, 0].tolist()


def test_an_episode_reads_its_own_blocks_over_a_flip_and_no_other_episode_does(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, same, short, late, sent = (Session() for _ in range(5))
    with rig.engine.keeping_episodes(), rig.engine.stopping_at():
        _, first = turn(rig, LONG, own, tokens=100)
        assert turn(rig, LONG, same, tokens=100)[0] == 256, "a group computes its prompt once"
        turn(rig, LONG, short, tokens=1)
        context = LONG + first.tokens + prompt(3)
        branch = context[:390] + prompt(5)
        rig.put(5)
        monkeypatch.setattr(engine, "salt", lambda label: "0:4")
        cached, got = turn(rig, context, sent)
        assert cached == 0, "sent before the flip, begun after it"
        monkeypatch.undo()
        assert worst(got.logprobs, logprobs(rig.models[5], context + got.tokens)[len(context) - 1 :]) < TOLERANCE
        assert turn(rig, context, late)[0] == 384, "of the new version, which `sent` computed"
        assert turn(rig, context, short)[0] == 256, "the prompt it began with, not what another sampled then"
        for text, session in ((context, own), (branch, own), (context, same)):
            cached, got = turn(rig, text, session)
            assert cached == 384, "its own blocks of the old version"
            assert worst(got.logprobs, over_blocks(rig, 4, 5, text, got, blocks=3)) < TOLERANCE
            fresh = logprobs(rig.models[5], text + got.tokens)[len(text) - 1 :]
            assert worst(got.logprobs, fresh) > 0.01, "the versions differ enough to be told apart"
        rig.put(6)
        assert [turn(rig, context + prompt(6), session)[0] for session in (late, own)] == [384, 384]
        assert turn(rig, context, Session())[0] == 0
        assert own.label == "0:4" and late.label == "0:5"
    assert turn(rig, context + prompt(6), own)[0] == 384, (
        "with `keep` the new version's blocks, which Session() computed"
    )


def test_a_request_that_was_sent_before_the_flip_and_arrives_after_it_reads_no_old_block(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = rig.engine.weights.label
    rig.put(7)
    monkeypatch.setattr(engine, "salt", lambda label: old)
    cached, got = hits(rig)
    assert cached == 0 and [run.version for run in got.version_runs] == [7]
    assert worst(got.logprobs, logprobs(rig.models[7], LONG + got.tokens)[299:]) < TOLERANCE


def test_a_request_that_waits_in_the_engine_across_a_flip_reads_no_old_block(rig: EngineRig) -> None:
    assert hits(rig)[0] >= 256

    async def waiting() -> Generation:
        running = [asyncio.create_task(rig.engine.generate(prompt(i), 300)) for i in range(64)]  # max_num_seqs
        await rig.sampling(64)
        task = asyncio.create_task(rig.engine.generate(LONG, 8, temperature=0))
        await rig.put_async(8)
        assert not any(t.done() for t in running), "the flip came after a place was free"
        await asyncio.gather(*running)
        return await task

    before = rig.engine.counters.cached_tokens
    with rig.engine.stopping_at():
        got = rig.run(waiting())
    assert rig.engine.counters.cached_tokens == before and [run.version for run in got.version_runs] == [8]
    assert worst(got.logprobs, logprobs(rig.models[8], LONG + got.tokens)[299:]) < TOLERANCE


def test_a_canary_is_read_before_requests_that_wait(rig: EngineRig) -> None:
    """The running requests have the whole KV cache, and some of them are preempted."""
    most, weights = rig.config.rollout.engine.max_num_seqs, rig.engine.weights
    tokens, ended = [(i * 11) % 90 + 4 for i in range(32)], list[int]()

    async def read() -> CanaryRead:
        async def one(i: int) -> None:
            await rig.engine.generate(prompt(i), TOKENS)
            ended.append(i)

        tasks = [asyncio.create_task(one(i)) for i in range(2 * most)]
        await rig.sampling(most)
        found = await weights.canary(tokens)
        assert len(ended) < most, "it was read behind others that waited"
        await asyncio.gather(*tasks)
        return found

    with rig.engine.stopping_at():
        found = rig.run(read())
    assert worst(found.logprobs, logprobs(rig.models[weights.version], tokens)) < TOLERANCE


def test_a_cancelled_generate_frees_the_engine(rig: EngineRig) -> None:
    async def cancel() -> int:
        task = asyncio.create_task(rig.engine.generate(prompt(1), 490))
        await rig.sampling(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return rig.engine.llm.output_processor.get_num_unfinished_requests()

    with rig.engine.stopping_at():
        assert rig.run(cancel()) == 0


def test_a_flip_whose_caller_goes_away_is_finished_and_proven(rig: EngineRig, monkeypatch: pytest.MonkeyPatch) -> None:
    flip, core, started = rig.engine.weights.flip, rig.core, asyncio.Event()

    async def stopped(*arguments: Any) -> Flip:
        core.suspend()
        started.set()
        return await flip(*arguments)

    async def abandoned() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(rig.engine.weights, "flip", stopped)
            await asyncio.to_thread(rig.publish, 9)
            await started.wait()
            rig.client.follow(rig.address, 1)  # as after a learner's restart
            await asyncio.sleep(0)
        core.resume()
        await until_async(lambda: rig.engine.weights.version == 9, "the end of the flip")
        await rig.active(9)  # sent again: the learner never heard that it was active

    rig.run(abandoned())
    assert rig.client.state.excluded is None
    rig.samples_with(9)


@pytest.mark.parametrize(
    ("tokens", "fact"),
    [
        *(([5, strange, 6], f"token {strange}, ") for strange in (100, 127, 1 << 20, 1 << 40, -1)),
        ([5] * 600, "512"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_refused_and_the_engine_lives(
    rig: EngineRig, tokens: list[int], fact: str
) -> None:
    with pytest.raises(ValueError) as refused:
        rig.run(rig.engine.generate(tokens, 4))
    assert fact in str(refused.value)
    assert rig.run(rig.engine.generate([5, 99, 6], 4)).tokens


def test_one_element_damaged_on_its_way_is_rejected_sent_again_and_never_flipped(rig: EngineRig) -> None:
    async def damaged() -> None:
        await rig.engine.damage_next_bucket(3)
        await rig.put_async(10)

    failed: list[StagingFailed] = []
    stage = rig.engine.weights.stage

    async def staged(publish: bytes, watch: Watch) -> float:
        try:
            return await stage(publish, watch)
        except StagingFailed as error:
            failed.append(error)
            assert rig.engine.weights.version == 9
            raise

    rig.engine.weights.stage = staged  # type: ignore[method-assign]
    rig.run(damaged())
    rig.engine.weights.stage = stage  # type: ignore[method-assign]
    assert [error.kind for error in failed] == [FailureKind.DAMAGED] and "bucket 3 " in str(failed[0])
    rig.samples_with(10)
    assert rig.client.state.excluded is None and rig.publisher.stats().fatal is None


def test_a_small_step_arrives_as_a_delta_and_a_damaged_one_comes_again_whole(rig: EngineRig) -> None:
    rig.put(11, model=nudged(rig.models[10]))
    whole = sum(tensor.nbytes for _, tensor in exported(rig.models[11]))
    until(lambda: rig.publisher.stats().version_active == 11)
    assert rig.publisher.stats().publish_bytes < 0.15 * whole
    rig.samples_with(11)
    rig.run(rig.engine.damage_next_bucket(0))
    rig.put(12, model=nudged(rig.models[11]))
    until(lambda: rig.publisher.stats().version_active == 12)
    assert rig.publisher.stats().publish_bytes >= whole, "the second attempt is the whole version"
    rig.samples_with(12)
    assert rig.client.state.excluded is None


def test_an_agent_s_tokens_and_log_probabilities_are_those_of_the_engine_version_by_version(rig: EngineRig) -> None:
    """At each turn's temperature, over all conversations, with seeds and stops, against Hugging Face."""
    from openai import AsyncOpenAI

    job = 0.8
    turns = {13: None, 14: 0.5, 15: 1.3}  # version to the temperature that the agent asks for
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}[assistant]"  # `<eos>` is one token
    )
    heard: list[list[float]] = []
    stops = list(range(20, 60))

    async def agent(problem: Any, *, base_url: str, api_key: str, model: str, seed: int) -> float:
        messages: Any = [{"role": "user", "content": problem["say"]}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

            async def ask(found: Any, **more: Any) -> Any:
                common = {"model": model, "logprobs": True, "extra_body": {"return_token_ids": True}}
                said = (await client.chat.completions.create(messages=found, **(common | more))).choices[0]
                assert said.logprobs is not None and said.logprobs.content is not None
                heard.append([entry.logprob for entry in said.logprobs.content])
                return said

            for version, temperature in turns.items():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(rig.put_async(version), rig.loop))
                said = await ask(messages, max_tokens=12, temperature=temperature)
                messages += [said.message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
            extra = {"return_token_ids": True, "stop_token_ids": stops}
            once = await ask(messages[:1], seed=7, max_tokens=40, temperature=1.1, extra_body=extra)
            assert once.finish_reason == "stop" and once.token_ids[-1] in stops
            assert not set(once.token_ids[:-1]) & set(stops)
            again = [await ask(messages[:1], seed=each, max_tokens=40, temperature=1.1) for each in (7, 7, 8)]
            assert again[0].token_ids == again[1].token_ids != again[2].token_ids
            assert again[0].token_ids[: min(32, len(once.token_ids))] == once.token_ids[:32]
        return 1.0

    host = EnvironmentThread()

    async def once() -> Any:
        backend = ThreadBackend(agent, {}, host)
        budget = Budget(8, 400, 400)
        rules = EpisodeRules(budget, Sampling(job))
        driver = AgentDriver(rig.engine, Renderer(tokenizer), backend, rules)
        try:
            return await driver.run({"say": "hello there"}, 0)
        finally:
            await driver.close()

    try:
        sample = rig.run(once())
    finally:
        host.close()
    assert (sample.error, sample.reward, len(sample.branches)) == (None, 1.0, 4)
    trained = [path.behavior_logprobs.numpy()[path.loss_mask.numpy() == 1].tolist() for path in sample.paths]
    told = sorted(value for turn in heard for value in turn)
    assert sorted(value for part in trained for value in part) == pytest.approx(told, abs=1e-6)
    seen = set()
    for path in sample.paths:
        tokens, mask, versions = path.tokens.numpy().tolist(), path.loss_mask.numpy(), path.token_versions()
        heat = np.full(len(tokens), job)
        for run in path.temperature_runs:
            heat[run.start :] = run.temperature
        for version, temperature in {(int(v), float(t)) for v, t, m in zip(versions, heat, mask, strict=True) if m}:
            expected = [0.0, *logprobs(rig.models[version], tokens, temperature)]
            own = [i for i in range(len(tokens)) if mask[i] and versions[i] == version and heat[i] == temperature]
            assert max(abs(expected[i] - path.behavior_logprobs.numpy()[i]) for i in own) < 2e-4
            seen.add((version, temperature))
    assert seen == {(13, job), (14, 0.5), (15, 1.3), (15, 1.1)}


def test_one_damaged_element_is_caught_by_the_proof_and_stops_the_engine(rig: EngineRig) -> None:
    async def damaged() -> list[object]:
        await rig.engine.damage_next_load("down_proj")
        running = [asyncio.create_task(rig.engine.generate(prompt(i), 450)) for i in range(4)]
        await rig.sampling(4)
        await rig.put_async(5)
        return await asyncio.gather(*running, return_exceptions=True)

    with rig.engine.stopping_at():
        results = rig.run(damaged())
    assert all(isinstance(r, SlipstreamError) for r in results), "nothing that was sampled meanwhile gets out"
    rig.is_excluded(15, "published")
    until(lambda: rig.publisher.stats().fatal is not None)
    assert "published" in (rig.publisher.stats().fatal or "")


def test_an_engine_that_hangs_in_a_flip_is_given_up_with_a_reason(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all others: it leaves the engine as it found it, excluded."""
    monkeypatch.setattr(engine_weights, "ENGINE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(engine_weights, "PAUSE_TIMEOUT_S", 0.5)
    core = rig.core

    async def flip() -> None:
        weights = engine_weights.EngineWeights(recompute=False)
        await weights.attach(rig.engine.llm, usable=True)
        try:
            await weights.flip(0, 99, "")
        finally:
            with pytest.raises(SlipstreamError) as refused:
                weights.check_usable()
            assert "version 99" in str(refused.value)

    core.suspend()
    try:
        with pytest.raises(ProofFailed) as raised:
            rig.run(flip(), 20)
        assert raised.value.kind is FailureKind.ENGINE
    finally:
        core.resume()
