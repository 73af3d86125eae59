"""Which parameters of a request are honoured; every other is refused by name, never silently dropped.

The learner recomputes log-probabilities of the unmodified distribution at the job's temperature. Penalties, biases,
masks, grammars and other temperatures change the sampling distribution, which would bias every importance ratio. So a
request that asks for one gets an error. null stands for the default.
"""

import difflib
from collections.abc import Collection
from typing import Any

from rollout_fleet.episode.driver import Sampling

CODE = "invalid_request_error"
BENT = "it would change the distribution that is sampled from, which the learner computes again as it is"
CUT = "what the policy sampled is trained on as it is; end at its end token"
ONE = "one conversation is one sample"
DRAWN = "draws are the engine's own, different for every sample"
FREE = "whether tools are called is the policy's choice, which is what is trained"
SHOWN = "the chat template renders every request alike"
ONLY_SAMPLED = "log-probabilities are recorded of the sampled tokens only"
UNKNOWN = "this endpoint does not know it, and it might change what is sampled"

# bookkeeping: neither tokens nor answer depend on it
WITHOUT_EFFECT = {
    "cache_salt", "include_stop_str_in_output", "metadata", "moderation", "priority", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
    "session_id", "store", "stream_interval", "user",
}  # fmt: skip
# the values that ask for nothing, and why others are refused; names of OpenAI's API and of vLLM's additions
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), SHOWN),
    "add_special_tokens": ((False,), SHOWN),
    "allowed_token_ids": (([],), BENT),
    "audio": ((), "answers are text"),
    "bad_words": (([],), BENT),
    "best_of": ((1,), ONE),
    "chat_template": ((), SHOWN),
    "chat_template_kwargs": (({},), SHOWN),
    "continue_final_message": ((False,), SHOWN),
    "documents": (([],), SHOWN),
    "echo": ((False,), "the answer is what the policy said"),
    "frequency_penalty": ((0,), BENT),
    "function_call": (("auto", "none"), FREE),
    "functions": (([],), "name functions in 'tools'"),
    "ignore_eos": ((False,), BENT),
    "include_reasoning": ((True,), "the answer is all that the policy said"),
    "length_penalty": ((1,), BENT),
    "logit_bias": (({},), BENT),
    "min_p": ((0,), BENT),
    "min_tokens": ((0,), BENT),
    "modalities": ((["text"],), "answers are text"),
    "n": ((1,), ONE),
    "parallel_tool_calls": ((True,), FREE),
    "prediction": ((), "what the policy says is not guessed in advance"),
    "presence_penalty": ((0,), BENT),
    "prompt_logprobs": ((), ONLY_SAMPLED),
    "reasoning_effort": ((), SHOWN),
    "repetition_penalty": ((1,), BENT),
    "response_format": (({"type": "text"},), BENT),
    "return_tokens_as_token_ids": ((False,), "ask for 'return_token_ids'"),
    "seed": ((), DRAWN),
    "skip_special_tokens": ((False,), "the answer is all that the policy said"),
    "stop": (([], ""), CUT),
    "stop_token_ids": (([],), CUT),
    "structured_outputs": ((), BENT),
    "suffix": (("",), "completions continue their prompt"),
    "tool_choice": (("auto", "none"), FREE),
    "top_k": ((-1, 0), BENT),
    "top_logprobs": ((0,), ONLY_SAMPLED),
    "truncate_prompt_tokens": ((), "prompts are continued as they were recorded"),
    "use_beam_search": ((False,), BENT),
    "verbosity": ((), SHOWN),
    "web_search_options": ((), "there is no web here; name a tool of your own"),
}  # fmt: skip


class BadRequest(Exception):
    """The request cannot be served: `parameter` is to blame, if any; `code` and `status` are as in OpenAI's API."""

    def __init__(self, message: str, parameter: str = "", code: str = CODE, status: int = 400) -> None:
        self.parameter, self.code, self.status = parameter, code, status
        super().__init__(message)


def check_parameters(body: dict[str, Any], job: Sampling, served: Collection[str]) -> None:
    """Raise BadRequest when `body` asks for what it would not get; the caller honours the parameters in `served`."""
    for name, found in body.items():
        if found is None or name in WITHOUT_EFFECT:
            continue
        if name in ("temperature", "top_p"):
            expected, why = (getattr(job, name),), f"the job's, or absent: {BENT}"
        elif name in NEUTRAL:
            expected, why = NEUTRAL[name]
        elif name in served:
            continue
        else:
            near = difflib.get_close_matches(name, [*served, *NEUTRAL], 1)
            expected, why = (), UNKNOWN + (f"; did you mean '{near[0]}'?" if near else "")
        if not expected:
            raise BadRequest(f"'{name}' is not served: {why}", name, "unsupported_parameter")
        if not any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in expected):
            wanted = " or ".join(map(repr, expected))
            raise BadRequest(f"'{name}' must be {wanted}, found {str(found)[:80]!r}: {why}", name, "unsupported_value")
