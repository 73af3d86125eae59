"""Gains and costs of exact deltas, on versions of a real GRPO run: python bench/delta.py.

A transformer of 26 million parameters is trained in float32 with AdamW, as the learner does, on completions that it
samples itself. Each step's weights are exported to bfloat16 (and float32) into the flat buffer of the weight plane. The
buffer of one version is encoded against that of the one before. Per learning rate: changed elements, bytes, and seconds
to encode and to apply, as medians over steps, and XOR with zlib for comparison. Every delta is applied and compared bit
for bit. `--steps 1` is the short mode.
"""

import statistics
import tempfile
import zlib
from pathlib import Path

import harness
import torch
from harness import timed

from common.weights.wire import delta, flat_buffer
from common.weights.wire.layout import Layout

CASES = ((1e-6, "bfloat16"), (1e-6, "float32"), (3e-6, "bfloat16"), (1e-5, "bfloat16"))  # learning rate, dtype
SETTLE = 3  # steps before the first that is measured: Adam's first ones are larger
PROMPTS, GROUP, PROMPT, TOKENS, VOCABULARY = 4, 4, 12, 24, 4096


def make_model(folder: Path):
    from transformers import Qwen3ForCausalLM

    harness.qwen3(
        folder, vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM.from_pretrained(folder)


def grpo_step(model, optimizer) -> None:
    """Sample groups, reward even tokens, one policy-gradient step with the group's mean as baseline."""
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT)).repeat_interleave(GROUP, 0)
    with torch.no_grad():
        tokens = model.generate(prompts, max_new_tokens=TOKENS, do_sample=True, top_k=0, pad_token_id=0)
    rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = model(tokens).logits[:, PROMPT - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]
    loss = -(advantages * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def export(model, dtype: str) -> torch.Tensor:
    named = [(name, tensor.detach()) for name, tensor in model.named_parameters()]
    return flat_buffer.pack(named, Layout.of([(name, dtype, tuple(tensor.shape)) for name, tensor in named]))


def compared(old: torch.Tensor, new: torch.Tensor, item_bytes: int) -> dict:
    stream, encode_s = timed(lambda: delta.encode(old, new, delta.BLOCK_BYTES))
    result = old.clone()
    _, apply_s = timed(lambda: delta.apply(stream, result, delta.BLOCK_BYTES))
    assert torch.equal(result, new)
    a, b = (x.view(torch.int16 if item_bytes == 2 else torch.int32) for x in (old, new))
    steps = (b.int() - a.int())[a != b].abs() if item_bytes == 2 else None
    xor = (a ^ b).numpy().tobytes()
    full = new.numel()
    return {
        "changed": float((a != b).float().mean()),
        "steps_of_one": float((steps == 1).float().mean()) if steps is not None else None,
        "share": stream.numel() / full,
        "encode_s": encode_s,
        "apply_s": apply_s,
        "verify_s": timed(lambda: flat_buffer.checksum(new))[1],
        "share_xor_zlib": len(zlib.compress(xor, 1)) / full,
    }


def measured(rate: float, dtype: str, steps: int) -> dict:
    """Medians over `steps` pairs of neighbouring versions."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(SETTLE):
        grpo_step(model, optimizer)
    held, pairs = export(model, dtype), []
    for _ in range(steps):
        grpo_step(model, optimizer)
        now = export(model, dtype)
        pairs.append(compared(held, now, 2 if dtype == "bfloat16" else 4))
        held = now
    row = {name: statistics.median(pair[name] for pair in pairs) for name, x in pairs[0].items() if x is not None}
    full = held.numel()
    # Sending `share` of the bytes pays where a link carries fewer bytes per second than this.
    worth = full * (1 - row["share"]) / (row["encode_s"] + row["apply_s"] + row["verify_s"])
    rounded = {name: float(f"{value:.3g}") for name, value in row.items()}
    found = {"lr": rate, "dtype": dtype, "full_bytes": full, "steps_of_one": None, **rounded}
    found["pays_below_mb_per_s"] = round(worth / 1e6)
    print(found, flush=True)
    return found


@harness.script(steps=4)
def main(options: harness.Options) -> harness.Figures:
    torch.set_num_threads(1)
    return {"rounds": options.steps, "rows": [measured(*case, options.steps) for case in CASES]}
