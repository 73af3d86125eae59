"""The conversations of one episode, token by token: a tree of turns in which every path is exact.

A request repeats the whole conversation as text. This module finds the earlier turn with the same text and appends only
the new text to its sampled tokens. So a turn's tokens are always an exact prefix of the next prompt, even if an agent
changes spaces. Sampled tokens are never tokenised again. A request that continues no turn begins a new tree.
"""

import asyncio
from dataclasses import dataclass, replace

from rollout_fleet.agents import api
from rollout_fleet.agents.stops import StopSampler
from rollout_fleet.environments.protocol import StopReason
from rollout_fleet.episode.driver import EpisodeRules, Progress, generate
from rollout_fleet.episode.rendering import ParsedTurn, Renderer, parse_turn, tool_format
from rollout_fleet.episode.sampler_protocol import Generation, Sampler
from rollout_fleet.episode.token_record import TokenRecord

Words = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """A call of the model, with everything before it."""

    words: Words  # identities of the messages, the policy's answer included; () for completions
    text: str | None  # prompt and answer of a completion; None for chats
    tools: str
    ended: bool  # whether the policy ended the turn itself, by an end token
    cut: bool  # whether its length ended it
    record: TokenRecord  # tokens of the whole path; turns that continue this one grow the same record
    length: int  # this and the next two: the record's counts when this turn was its last
    turns: int
    sampled: int
    before: "Turn | None"  # the turn that this one continues
    trained: bool  # False for a frozen sub-agent's
    said: str  # the answer as the agent got it

    def path(self) -> TokenRecord:
        """The record up to and with this turn; a copy only when another turn has continued it."""
        if len(self.record.tokens) == self.length:
            return self.record
        return self.record.prefix(self.length, self.turns, self.sampled)


class Conversation:
    """One episode as the endpoint sees it. It calls the model for one request at a time, in the order of arrival."""

    def __init__(self, sampler: Sampler, renderer: Renderer, rules: EpisodeRules, progress: Progress) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._progress = progress
        self._budget = rules.budget
        self._sampling = rules.sampling
        greedy = rules.sampling.temperature == 0
        self.terms = api.Terms(rules.named or rules.sampling, greedy, rules.taught, rules.agents)
        self._format = tool_format(renderer.template)
        self._lock = asyncio.Lock()
        self.turns: list[Turn] = []
        self.sampled = 0
        self.exhausted: StopReason | None = None  # a request was refused because the budget is used up

    async def answer(self, request: api.AnyRequest) -> api.Answer:
        """Sample one turn.

        Raises api.BadRequest when the budget is used up or the request cannot be served, and EpisodeFailed or
        SlipstreamError when the engine fails.
        """
        async with self._lock:
            budget = self._budget
            if budget.max_turns is not None and len(self.turns) >= budget.max_turns:
                used_up = f"all {budget.max_turns} turns of rollout.max_turns are used up"
                raise self._refused(StopReason.TURN_LIMIT, used_up)
            try:
                chat = isinstance(request, api.ChatRequest)
                before, new, words = self._chat(request) if chat else self._completion(request)
            except Exception as error:  # jinja has errors of its own
                raise api.BadRequest(f"the chat template fails: {type(error).__name__}: {error}") from error
            record = TokenRecord() if before is None else before.path()
            prompt = record.tokens + new
            room = min(budget.max_tokens - self.sampled, budget.max_context - len(prompt))
            if room <= 0:
                sampled_all = self.sampled >= budget.max_tokens
                bound = f"all {budget.max_tokens} tokens of rollout.max_tokens are sampled"
                full = f"a prompt of {len(prompt)} tokens fills rollout.engine.max_model_len ({budget.max_context})"
                raise self._refused(StopReason.LENGTH, bound if sampled_all else full)
            room = min(room, request.max_tokens or room)
            record.name = request.agent
            tokens = frozenset(request.stop_token_ids or ())
            sampler = StopSampler(self._sampler, self._renderer, request.stops, tokens)
            generation = await self._sample(record, new, room, request=request, sampler=sampler)
            return self._kept(
                request, record, words, prompt=prompt, generation=generation, before=before, stopped=sampler
            )

    async def _sample(
        self, record: TokenRecord, new: list[int], room: int, *, request: api.AnyRequest, sampler: StopSampler
    ) -> Generation:
        """Continue `record` by `new` and the policy's answer; a failure leaves the record unchanged."""
        record.observe(new)
        before = len(record.tokens)
        named = request.temperature
        job = self.terms.job.temperature
        temperature = self._sampling.temperature if named in (None, job) else named
        sampling = replace(self._sampling, temperature=temperature, seed=request.seed)
        used = sampler if request.stops or request.stop_token_ids else self._sampler
        try:
            generation = await generate(used, record, room=room, sampling=sampling, progress=self._progress)
        except BaseException:
            if len(record.tokens) == before:
                record.retract(len(new))
            raise
        self.sampled += len(generation.tokens)
        record.sampled_at(temperature, self._sampling.temperature)
        if not self.terms.agents.get(request.agent, True):
            record.untrain(before, len(record.tokens))
        return generation

    def longest(self) -> Turn | None:
        """The path with the most sampled tokens, of several the one that came last; None before the first turn.

        The agent's own paths come before those of its sub-agents, and these before frozen ones.
        """
        rank = [(turn.trained, not turn.record.name, turn.sampled, number) for number, turn in enumerate(self.turns)]
        return self.turns[max(rank)[-1]] if rank else None

    def whole(self) -> TokenRecord:
        """The longest path, with all others as its branches; each sampled token is in the loss of one of them."""
        main = self.longest()
        continued = {turn.before for turn in self.turns}
        ends = [turn for turn in self.turns if turn not in continued and turn is not main]
        counted = set[Turn]()
        found: list[TokenRecord] = []
        for end in [main, *ends] if main is not None else []:
            record = end.record.prefix(end.length, end.turns, end.sampled)
            chain: Turn | None = end
            for start, stop in reversed(record.spans):
                assert chain is not None
                if chain in counted or not chain.trained:
                    record.untrain(start, stop)
                    record.sampled -= stop - start
                counted.add(chain)
                chain = chain.before
            record.runs = record.runs if end.trained else []
            found.append(record)
        if not found:
            return TokenRecord()
        found[0].branches = found[1:]
        return found[0]

    @property
    def frozen(self) -> int:
        """Tokens of frozen sub-agents' answers."""
        last = [turn.record.spans[turn.turns - 1] for turn in self.turns if not turn.trained]
        return sum(end - start for start, end in last)

    def _refused(self, reason: StopReason, message: str) -> api.BadRequest:
        self.exhausted = reason
        return api.BadRequest(f"the episode is over: {message}", code="context_length_exceeded")

    def _chat(self, request: api.ChatRequest) -> tuple[Turn | None, list[int], Words]:
        """The turn to continue, the tokens of the new text, and the identities of the request's messages."""
        messages = request.messages
        words = tuple(map(api.identity, messages))
        fits = [  # turns whose messages the request repeats, and which only others have answered since
            turn
            for turn in self.turns
            if turn.words
            and turn.record.name == request.agent
            and turn.tools == request.tools
            and len(words) > len(turn.words)
            and words[: len(turn.words)] == turn.words
            and all(role != "assistant" for role, _, _ in words[len(turn.words) :])
        ]

        def likeness(turn: Turn) -> tuple[int, bool]:
            return len(turn.words), messages[len(turn.words) - 1]["content"].strip() == turn.said.strip()

        before = max(fits, key=likeness, default=None)
        if before is None:
            return None, self._renderer.prompt(messages, request.tools), words
        new = messages[len(before.words) :]
        end = before.record.tokens[before.length - 1] if before.ended else None
        return before, self._renderer.encode(self._renderer.continuation(new, end, request.tools)), words

    def _completion(self, request: api.CompletionRequest) -> tuple[Turn | None, list[int], Words]:
        prompt = request.prompt

        def known(turn: Turn) -> str | list[int]:
            return turn.text or "" if isinstance(prompt, str) else turn.record.tokens[: turn.length]

        own = [turn for turn in self.turns if turn.text is not None and turn.record.name == request.agent]
        fits = [turn for turn in own if prompt[: len(known(turn))] == known(turn)]
        found = max(fits, key=lambda turn: turn.sampled, default=None)
        new = prompt if found is None else prompt[len(known(found)) :]
        if not isinstance(new, str):
            return found, list(new), ()
        return found, self._renderer.first(new) if found is None else self._renderer.encode(new), ()

    def _kept(
        self,
        request: api.AnyRequest,
        record: TokenRecord,
        words: Words,
        *,
        prompt: list[int],
        generation: Generation,
        before: Turn | None,
        stopped: StopSampler,
    ) -> api.Answer:
        ended = generation.finish_reason == "stop"
        by_token = ended and stopped.text is None
        whole = self._renderer.text(generation.tokens[:-1] if by_token else generation.tokens)
        text = whole if stopped.text is None else stopped.text
        found = parse_turn(text, self._format) if request.tools and ended else ParsedTurn(text)
        number = len(self.turns)
        answer = api.Answer(
            text=found.text,
            calls=tuple((f"call_{number}_{i}", call) for i, call in enumerate(found.calls)),
            finish_reason="length" if not ended else "tool_calls" if found.calls else "stop",
            prompt_tokens=prompt,
            tokens=generation.tokens,
            pieces=[self._renderer.text([token]) for token in generation.tokens] if request.scored else [],
            logprobs=generation.logprobs if request.scored else [],
            stop=stopped.stop,
        )
        known: str | None = None
        if isinstance(request, api.ChatRequest):
            words = (*words, api.identity(api.assistant(answer)))
        else:
            known = (request.prompt if isinstance(request.prompt, str) else self._renderer.text(prompt)) + whole
        turn = Turn(
            words=words,
            text=known,
            tools=request.tools,
            ended=by_token,
            cut=not ended,
            record=record,
            length=len(record.tokens),
            turns=record.turns,
            sampled=record.sampled,
            before=before,
            trained=self.terms.agents.get(request.agent, True),
            said=found.text,
        )
        self.turns.append(turn)
        return answer
