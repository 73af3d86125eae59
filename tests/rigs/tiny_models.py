"""Tiny models of every architecture, packed documents, what plain transformers makes of them, and a backend.

Initial values are large, and no norm or bias is trivial, so that an error shows. The last functions make what a
supervised run needs: conversations, and a model with a chat template.
"""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import Tensor

from common.config.critic import CriticConfig
from common.config.lora import LoraConfig
from common.config.loss_keys import LossConfig
from common.config.schema import (
    LearnerConfig,
    MegatronConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
)
from common.errors import SlipstreamError
from launch.quickstart.assets import build_tokenizer
from learner.backend_protocol import LossFunction, LossOutput, Microbatch, StepResult
from learner.certificate import rank as of_megatron
from learner.certificate import reference as of_transformers
from learner.certificate.batch import packs
from tests.rigs.device import TF32

VOCABULARY, TEMPERATURE, STEPS = 128, 0.7, 2
# eps: with 1e-8 Adam makes whole steps of the rounding of gradients that are nearly zero
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, warmup_steps=2, schedule="cosine", weight_decay=0.01, grad_clip=1.0)

# Certificates measure with the same functions.
in_files, gradients_in_files = of_transformers.in_files, of_transformers.gradients_in_files
gradients, gradients_in_place = of_megatron.gradients, of_megatron.gradients_in_place
share, numbered = of_megatron.share, of_megatron.numbered

Kind = tuple[str, dict[str, Any]]  # the architecture's name in transformers, keys of its config

DEFAULT_ROPE = {"rope_theta": 1e6, "rope_type": "default"}
SHARED: dict[str, Any] = {
    **dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, initializer_range=0.2),
    **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, attn_implementation="sdpa"),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, rope_parameters=DEFAULT_ROPE),
}
LLAMA3_ROPE = {
    **{"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    **{"rope_theta": 1e4, "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": dict(tie_word_embeddings=True),
    "Qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "Llama": dict(rope_parameters=LLAMA3_ROPE),
    "Mistral": dict(head_dim=16, sliding_window=6),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=False),
    "DeepseekV3": {
        **dict(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
        **dict(n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=32),
        **dict(n_group=4, topk_group=2, first_k_dense_replace=1, num_key_value_heads=4, rms_norm_eps=1e-3),
        **dict(rope_parameters=YARN_ROPE),
    },
    "Glm4Moe": {
        **dict(n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=32),
        **dict(head_dim=16, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True),
        **dict(rope_parameters=DEFAULT_ROPE | {"partial_rotary_factor": 0.5}),
    },
}
KINDS: dict[str, Kind] = {
    "tied": ("Qwen3", {}),
    "untied": ("Qwen3", dict(num_key_value_heads=4, tie_word_embeddings=False)),  # enough heads for tensor 4
    "wide": ("Qwen3", dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, initializer_range=0.02)),
    "served": ("Qwen3", dict(head_dim=32)),  # vLLM has no smaller heads on a CPU
    "qwen2": ("Qwen2", {}),
    "qwen2.5-untied": ("Qwen2", dict(tie_word_embeddings=False)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", dict(rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0})),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {}),
    "mixtral-window": ("Mixtral", dict(sliding_window=6)),
    "moe": ("Qwen3Moe", {}),
    "normed": ("Qwen3Moe", dict(norm_topk_prob=True)),
    "normed-window": ("Qwen3Moe", dict(norm_topk_prob=True, use_sliding_window=True, sliding_window=6)),
    "deepseek-v3": ("DeepseekV3", {}),
    "deepseek-v3-rope": ("DeepseekV3", dict(rope_parameters=DEFAULT_ROPE)),
    "deepseek-v3-plain": ("DeepseekV3", dict(q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=DEFAULT_ROPE)),
    "glm": ("Glm4Moe", {}),
}
# For stages of several pieces, more than two stages, uneven ones, and those with layers of both sorts.
DEEP = {"num_hidden_layers": 4}
DEEPENED = ("tied", "untied", "qwen2", "llama", "moe", "deepseek-v3", "glm")
KINDS |= {f"{kind}-deep": (KINDS[kind][0], KINDS[kind][1] | DEEP) for kind in DEEPENED}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{{ '\n' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}assistant: {% endif %}"
MARKED = "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
MARKED += "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"


def new_model(kind: str | Kind, seed: int = 0, **changes: Any) -> Any:
    """A float32 transformers model with random weights, the same each time; `changes` are keys of its config."""
    architecture, own = KINDS[kind] if isinstance(kind, str) else kind
    values = copy.deepcopy(SHARED | ARCHITECTURES[architecture] | own | changes)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{architecture}Config")(**values)
    return uneven(getattr(transformers, f"{architecture}ForCausalLM")(config)).float()


def new_critic(kind: str, seed: int = 5) -> Any:
    """A float32 value model of the kind's shape by transformers, the same each time."""
    config = new_model(kind).config
    config.num_labels = 1
    torch.manual_seed(seed)
    return uneven(getattr(transformers, f"{KINDS[kind][0]}ForSequenceClassification")(config)).float()


def values(model: Any, tokens: Tensor) -> Tensor:
    """[L] of a document's inputs [L], by a model like `new_critic`'s."""
    return model.score(model.model(tokens[None]).last_hidden_state[0]).squeeze(1)


def uneven(model: Any) -> Any:
    """The model, with norms that are not all ones and biases that are not all zeros."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.rand_like(tensor) * 0.2)
            elif tensor.dim() == 1 and "inv_freq" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def save(model: Any, path: Path) -> Any:
    """Write the folder of a model, with a tokenizer that no test loads; returns the model."""
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text(json.dumps({"of": path.name}))
    return model


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    """FOLDER/models/KIND of every kind in the spec."""
    for kind in spec["kinds"]:
        save(new_model(kind), folder / "models" / kind)


# ---------------------------------------------------------------- documents and their loss


def microbatches(step: int) -> list[Microbatch]:
    """The packs of one step."""
    return packs(100 + step, VOCABULARY)


def policy_loss(logprobs: Tensor, entropy: Tensor | None, batch: Microbatch) -> LossOutput:
    """A policy gradient with an entropy bonus: both outputs of the backend get a gradient."""
    assert entropy is not None
    terms = -(logprobs * batch.advantages) - 0.05 * entropy
    sums = {"entropy": (entropy.detach() * batch.loss_mask).sum()}
    highest = logprobs.detach().masked_fill(batch.loss_mask == 0, -torch.inf).max()
    return LossOutput((terms * batch.loss_mask).sum(), sums, {"highest": highest})


def hugging_face(model: Any, batch: Microbatch) -> tuple[Tensor, Tensor]:
    """([T] log-probabilities, [T] entropies) of the targets.

    They are computed one document at a time, so nothing about packing or padding can go wrong.
    """
    log_p = distributions(model, batch)
    return log_p.gather(1, batch.targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def distributions(model: Any, batch: Microbatch) -> Tensor:
    """[T, vocabulary] log-probabilities, one document at a time, at each target's own temperature."""
    return of_transformers.distributions(model, batch, TEMPERATURE)


def reference(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Log-probabilities and gradients of step 0, under the files' names, and its figures; of plain autograd."""
    tensors: dict[str, Tensor] = {}
    loss_sum, tokens, entropy_sum, highest = torch.zeros(()), 0.0, 0.0, float("-inf")
    for i, batch in enumerate(microbatches(0)):
        logprobs, entropy = hugging_face(model, batch)
        output = policy_loss(logprobs, entropy, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        loss_sum = loss_sum + output.loss_sum
        tokens += batch.loss_mask.sum().item()
        entropy_sum += output.sums["entropy"].item()
        highest = max(highest, output.maxima["highest"].item())
    loss = loss_sum / tokens
    gradients, norm = backward(model, loss)
    figures = dict(loss=loss.item(), tokens=tokens, norm=norm, entropy=entropy_sum, highest=highest)
    return tensors | gradients, figures


def backward(model: Any, loss: Tensor) -> tuple[dict[str, Tensor], float]:
    """(gradients as gradient.NAME under the names in the model's files, their norm)."""
    loss.backward()
    gradients = {f"gradient.{n}": g for n, g in gradients_in_files(model).items()}
    return gradients, torch.stack([g.double().norm() for g in gradients.values()]).norm().item()


def policy_sum(model: Any, batch: Microbatch) -> Tensor:
    """The sum of `policy_loss` over a pack."""
    return policy_loss(*hugging_face(model, batch), batch).loss_sum


def adamw(model: Any) -> torch.optim.AdamW:
    """OPTIMIZER by torch; norms are not decayed."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)


def adamw_steps(
    model: Any, lr: float = OPTIMIZER.lr, loss_sum: Callable[[Any, Microbatch], Tensor] = policy_sum
) -> None:
    """STEPS with torch's AdamW of a loss that is summed over a pack."""
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = microbatches(step)
        tokens = sum(batch.loss_mask.sum() for batch in batches)
        for batch in batches:
            (loss_sum(model, batch) / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = lr * (0.5, 1.0, 1.0)[step]  # two warmup steps, then the top of the cosine
        optimizer.step()


def check_update(before: dict[str, Tensor], found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that trained weights differ by less than a hundredth of the update; by ten of them after TF32."""
    assert expected
    most = 0.1 if TF32 else 0.01
    for name, reference in expected.items():
        moved, error = ((reference - x).double().norm() for x in (before[name], found[name]))
        assert error <= most * moved, f"{name}: {error / moved:.1e} of the update"


# ---------------------------------------------------------------- Megatron


def backend(folder: Path, spec: dict[str, Any]) -> Any:
    """The backend of a spec: its kind, dtype, sections of the learner's config, seed.

    The forward check of `verify` builds two more models; most tests compare with more care themselves.
    """
    from learner.megatron.backend import MegatronBackend

    path = str(folder / "models" / spec.get("kind", "tied"))
    model = ModelConfig(path=path, dtype=spec.get("dtype", "float32"), verify=spec.get("verify", False))
    reference = spec.get("reference")
    learner = LearnerConfig(
        loss=LossConfig(reference=str(folder / "models" / reference) if reference else None),
        minibatches=spec.get("minibatches", 1),
        parallel=ParallelConfig(**spec.get("parallel", {})),
        memory=MemoryConfig(**spec.get("memory", {})),
        moe=MoeConfig(**spec.get("moe", {})),
        lora=LoraConfig(**spec["lora"]) if spec.get("lora") else None,
        critic=msgspec.convert(spec["critic"], CriticConfig) if spec.get("critic") else None,
        optimizer=msgspec.structs.replace(OPTIMIZER, **spec.get("optimizer", {})),
        overlap=spec.get("overlap", True),
        megatron=MegatronConfig(extra=spec.get("extra", {})),
    )
    total = spec.get("steps", 10) * learner.updates
    return MegatronBackend(model, learner, total, seed=spec.get("seed", 1), resumes=spec.get("resumes", False))


def refusal(act: Callable[..., Any], *arguments: Any) -> str:
    """The message of the error that `act` ends with; '' if it works."""
    try:
        act(*arguments)
    except SlipstreamError as error:
        return str(error)
    return ""


def save_checkpoint(backend: Any, path: Path) -> None:
    """A checkpoint that is on the disk on return. Collective."""
    backend.start_checkpoint(path)
    backend.checkpoint_done(wait=True)


def logprobs(backend: Any, prefix: str = "logprobs") -> dict[str, Tensor]:
    """The log-probabilities of all tokens of the packs of step 0, numbered."""
    everywhere = [replace(batch, loss_mask=torch.ones_like(batch.loss_mask)) for batch in microbatches(0)]
    return numbered(backend, backend.logprobs(share(backend, everywhere), TEMPERATURE), prefix)


def exported(backend: Any, prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor.clone() for name, tensor in backend.export()}


def step(backend: Any, number: int) -> Any:
    """One optimizer step."""
    return backend.train_step(share(backend, microbatches(number)), policy_loss, TEMPERATURE, entropy=True)


def step_and_gradients(
    backend: Any, batches: list[Microbatch], loss: LossFunction = policy_loss
) -> tuple[StepResult, dict[str, Tensor]]:
    """An optimizer step on this rank's packs, and the gradients of before clipping as gradient.NAME."""
    found: dict[str, Tensor] = {}

    def keep(_: StepResult) -> bool:
        found.update({f"gradient.{name}": tensor for name, tensor in gradients(backend).items()})
        return True

    return backend.train_step(batches, loss, TEMPERATURE, entropy=True, accept=keep), found


def figures(backend: Any, number: int) -> list[float]:
    """[loss, gradient norm, learning rate] of one optimizer step."""
    result = step(backend, number)
    return [result.loss, result.grad_norm, result.lr]


def main_parameters(backend: Any) -> list[tuple[Tensor, dict[str, Any]]]:
    """(parameter, state) of all that the optimizers on this rank step."""
    inner = [each.optimizer for each in backend.optimizer.megatron.chained_optimizers]
    return [(p, each.state.get(p, {})) for each in inner for g in each.param_groups for p in g["params"]]


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Short dialogues of one to three answers."""
    draw = random.Random(5)
    talks: list[list[dict[str, str]]] = []
    for _ in range(count):
        talk = [{"role": "system", "content": "Add."}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 3)):
            a, b = draw.randint(0, 99), draw.randint(0, 99)
            talk.append({"role": "user", "content": f"{a}+{b}?"})
            talk.append({"role": "assistant", "content": str(a + b)})
        talks.append(talk)
    return talks


def write_conversations(path: Path, count: int = 16) -> None:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in conversations(count)))


def write_chat_model(folder: Path, kind: str) -> Any:
    """Write a model and a character tokenizer with a chat template; returns the model, in float32."""
    tokenizer = build_tokenizer()
    ends = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    model = new_model(kind, num_hidden_layers=2, initializer_range=0.1, **ends)
    model.save_pretrained(folder)
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(folder)
    return model
