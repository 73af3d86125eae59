"""Tokenizers with the chat templates of well-known families, cut down to what matters for token in, token out."""

import itertools
from typing import Any

from tokenizers.processors import TemplateProcessing

from common.rollouts import VersionRun
from launch.quickstart.assets import build_tokenizer
from rollout_fleet.episode.sampler_protocol import Generation
from tests.unit.rollout_fleet.fleet_fakes import ScriptedSampler

# Qwen3 in short: earlier turns lose their reasoning, tool answers travel as user turns, a think block may start a turn
QWEN = """
{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "assistant" %}
{%- set said = m.content.split("</think>")[-1] %}<|im_start|>assistant
{{ said }}<|im_end|>
{% elif m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""

# Llama 3 in short: a begin token, headers, contents trimmed
LLAMA = """<bos>
{%- for m in messages %}<|{{ m.role if m.role != "tool" else "ipython" }}|>

{{ m.content | trim }}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>

{% endif %}"""


def with_template(template: str, end: str) -> Any:
    """The character tokenizer of the quickstart with a chat template; `end` ends the assistant's turn (one token)."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template.replace("<|im_end|>", end)
    return tokenizer


def beginning(template: str | None = None) -> Any:
    """A tokenizer that puts <bos> before a text, as those of Llama and Mistral do, and <eos> behind it."""
    tokenizer = build_tokenizer()
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>")]
    added = TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = added
    tokenizer.chat_template = template
    return tokenizer


def qwen() -> Any:
    return with_template(QWEN, "<eos>")


def speaker(tokenizer: Any, *said: str | list[int] | Exception, ended: bool = True) -> ScriptedSampler:
    """Says one text, or list of tokens, after the other, with an end token if `ended`; each turn is a new version's."""
    left, versions = iter(said), itertools.count()

    def answer(_: str) -> Generation | Exception:
        turn = next(left)
        if isinstance(turn, Exception):
            return turn
        text = tokenizer.encode(turn, add_special_tokens=False) if isinstance(turn, str) else turn
        ids = [*text, tokenizer.eos_token_id]
        ids = ids if ended else ids[:-1]
        runs = [VersionRun(0, next(versions))]
        return Generation(ids, [-0.5 - i for i in range(len(ids))], runs, "stop" if ended else "length")

    return ScriptedSampler(answer)
