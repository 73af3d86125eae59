"""Agents of real libraries in a whole job: a policy that was taught a few questions calls their tool, and learns.

The demonstrations are each client's own episode with a policy that says what it is told. A warm start makes a random
model say it by itself. Then a node lets the clients talk to the real engine, and trains a step on it.
"""

import json
import os
import re
from collections import defaultdict
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from broker.journal.recording import open_recording
from common.process.run_dir import RunDir
from common.rollouts import Branch, Sample, decode_group
from launch.quickstart.assets import PRESETS, SPECIAL
from launch.resolve_target import config_of
from tests.rigs.jobs import Run, at_work, metrics
from tests.unit.rollout_fleet.chat_tokenizers import QWEN
from tests.unit.rollout_fleet.test_clients import play

CLIENTS = ("openai_agents", "smolagents", "anthropic")  # they call responses, chat, messages
REWRITES = "smolagents"  # its history is told in other words, so each of its turns is a path of its own
QUESTIONS = ((1, 2), (3, 4), (5, 6), (7, 8))
OPENINGS, CLOSINGS = ("Adding.", "Calling.", "Trying."), ("", ".")  # the policy may choose; rewards ask for ""
GROUP_SIZE, TEMPERATURE, ENTROPY = 4, 0.7, 0.01
TOLERANCE = 2e-4
CALLED = re.compile(r'<tool_call>{"name": "add", "arguments": {"a": (\d+), "b": (\d+)}}</tool_call>')
FINAL = re.compile(r'<tool_call>{"name": "final_answer", "arguments": {"answer": "(.*)"}}</tool_call>')
CONTEXT = 2048
SPOKEN = re.compile(r"<\|im_start\|>assistant\n(.*?(?:<eos>|$))", re.DOTALL)

Segments = list[list[Any]]  # [text, 1 if the policy says it]


def row(a: int, b: int) -> dict[str, str]:
    return {"question": f"{a} + {b}?", "answer": str(a + b + 1000)}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(client: str, a: int, b: int, opening: str, closing: str) -> list[str]:
    """Both turns of a policy that uses the tool."""
    answer = f"{a + b + 1000}{closing}"
    last = call("final_answer", answer=answer) if client == REWRITES else answer
    return [f"{opening} {call('add', a=a, b=b)}", last]


def demonstrations() -> list[Segments]:
    """The paths of each client's episode, for every question and in all words."""
    seen = (71, 82, "Hm hm.", "~~")  # no prompt has these of its own
    found = list[Segments]()
    for client in CLIENTS:
        sample, _, tokenizer = play(client, said(client, *seen), {"question": "71 + 82?", "answer": "1153~~"})
        assert (sample.error, sample.reward) == (None, 1.0), client
        for path in sample.paths:
            pairs = zip(path.loss_mask.numpy().tolist(), path.tokens.numpy().tolist(), strict=True)
            parts = [(mask, tokenizer.decode([t for _, t in own])) for mask, own in groupby(pairs, lambda p: p[0])]
            for (a, b), opening, closing in product(QUESTIONS, OPENINGS, CLOSINGS):
                words = {"71": str(a), "82": str(b), "1153": str(a + b + 1000), "Hm hm.": opening, "~~": closing}
                found.append([[_replaced(text, words).removesuffix("<eos>" * mask), mask] for mask, text in parts])
    return found


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def write_policy(texts: list[str], folder: Path) -> None:
    """A random model with a byte-level BPE tokenizer of these texts, digits apart, and a chat template with tools."""
    core = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    core.pre_tokenizer = pre_tokenizers.Sequence(split)
    core.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL.values())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **SPECIAL)
    tokenizer.chat_template = QWEN.replace("<|im_end|>", tokenizer.eos_token)
    tokenizer.save_pretrained(folder)
    shape = PRESETS["tiny"].model | {"max_position_embeddings": CONTEXT}
    ids: dict[str, Any] = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    torch.manual_seed(1)
    config = Qwen3Config(**shape, **ids, vocab_size=len(tokenizer), tie_word_embeddings=True, dtype="float32")
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.do_sample = True
    model.save_pretrained(folder)


def taught(folder: Path) -> Path:
    """The policy after a warm start on the demonstrations."""
    rows = demonstrations()
    write_policy(["".join(text + "<eos>" * mask for text, mask in segments) for segments in rows], folder / "random")
    (folder / "sft.jsonl").write_text("".join(json.dumps({"segments": segments}) + "\n" for segments in rows))
    (folder / "sft").mkdir()
    document = {
        "run": {"name": "taught", "dir": str(folder / "sft" / "run"), "steps": 100},
        "model": {"path": str(folder / "random"), "dtype": "float32"},
        "tasks": {"dataset": str(folder / "sft.jsonl")},
        "learner": {
            "sequences_per_step": 8,
            "optimizer": {"lr": 3e-3, "beta2": 0.95, "warmup_steps": 10, "schedule": "linear", "min_lr_fraction": 0.1},
        },
    }
    learner = Run(folder / "sft", document)
    learner.finish()
    return learner.run.model


def played(folder: Path, policy: Path) -> Path:
    """The run folder of a job of one step in which every client plays a group; another seed would draw their shares."""
    (folder / "questions.jsonl").write_text("".join(json.dumps(row(a, b)) + "\n" for a, b in QUESTIONS))
    rows = str(folder / "questions.jsonl")
    sources = {c: {"environment": f"examples.agent_clients:{c}", "dataset": rows} for c in CLIENTS}
    document = {
        "run": {"name": "clients", "dir": str(folder / "run"), "steps": 1, "seed": 4},
        "model": {"path": str(policy), "dtype": "float32"},
        "tasks": {"limits": {"python": os.environ["SLIPSTREAM_VERIFIERS_PYTHON"]}, "sources": sources},
        "learner": {
            "groups_per_step": len(CLIENTS), "optimizer": {"lr": 1e-4},
            "loss": {"advantage": "dr_grpo", "entropy_coefficient": ENTROPY},
        },
        "rollout": {
            "group_size": GROUP_SIZE, "max_tokens": 200, "max_turns": 4, "temperature": TEMPERATURE, "concurrency": 4,
            "sample_timeout_s": 300, "engine": {"max_model_len": CONTEXT, "kv_cache_mib": 64, "eager": True},
        },
        "staleness": {"max": 0},
    }  # fmt: skip
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(document))
    with at_work(config):
        pass
    return folder / "run"


def trained(folder: Path) -> dict[str, list[tuple[dict[str, str], list[Sample]]]]:
    """(row, samples) of the groups of step 0 by client."""
    config = config_of(RunDir(folder))
    assert config is not None
    found = defaultdict(list)
    with open_recording(RunDir(folder), config) as recording:
        for entry in recording.steps[0]:
            group = decode_group(entry.stored.read())
            found[group.source].append((json.loads(entry.task.problem), group.samples))
    return found


class Reading:
    """A path as text, and what Hugging Face makes of it."""

    def __init__(self, path: Sample | Branch, model: Any, tokenizer: Any) -> None:
        self.tokens, self.mask = path.tokens.numpy().tolist(), path.loss_mask.numpy() == 1
        self._pieces = [tokenizer.decode([token]) for token in self.tokens]
        self.text = "".join(self._pieces)
        heat = np.full(len(self.tokens), TEMPERATURE)
        for each in path.temperature_runs:
            heat[each.start :] = each.temperature
        logits = model(torch.tensor([self.tokens])).logits[0, :-1].double()
        rows = (logits / torch.tensor(heat[1:])[:, None]).log_softmax(-1)
        logprobs = rows.gather(1, torch.tensor(self.tokens)[1:, None])[:, 0].numpy()
        difference = np.abs(np.insert(logprobs, 0, 0.0) - path.behavior_logprobs.numpy())
        self.worst = difference[self.mask].max()
        self.unsampled = path.behavior_logprobs.numpy()[~self.mask]
        self.entropy = float(-(rows.exp() * rows).sum(-1).numpy()[self.mask[1:]].sum())

    def told(self, sampled: bool) -> list[str]:
        """The stretches of text that were sampled, or the others."""
        pairs = zip(self.mask, self._pieces, strict=True)
        return ["".join(p for _, p in own) for mask, own in groupby(pairs, lambda pair: pair[0]) if mask == sampled]

    def spoken(self, last: bool) -> np.ndarray:
        """[T] bool, where the template lets the assistant speak, or only where it does so last."""
        ends = np.cumsum([len(piece) for piece in self._pieces])
        starts = np.insert(ends[:-1], 0, 0)
        found = list(SPOKEN.finditer(self.text))[-1 if last else 0 :]
        return np.any([(starts >= each.start(1)) & (ends <= each.end(1)) for each in found], axis=0)

    def turns(self) -> list[tuple[int, ...]]:
        """The tokens up to and with each turn that trains."""
        ends = np.flatnonzero(np.diff(self.mask, append=False) & self.mask) + 1
        return [tuple(self.tokens[:end]) for end in ends]


@torch.no_grad()
def test_real_clients_call_their_tool_through_the_real_engine_and_all_that_was_sampled_trains_once(
    tmp_path: Path,
) -> None:
    policy = taught(tmp_path)
    folder = played(tmp_path, policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    found = trained(folder)
    assert found.keys() == set(CLIENTS)
    tokens, objective = 0, 0.0
    for client, groups in found.items():
        called = 0
        for problem, samples in groups:
            good = [sample for sample in samples if sample.error is None]
            baseline = np.mean([sample.reward for sample in good]) if len(good) > 1 else np.nan
            for sample in good:
                paths = [Reading(path, model, tokenizer) for path in sample.paths]
                called += check_sample(client, problem, sample, paths)
                own = sum(int(path.mask.sum()) for path in paths)
                advantage = np.nan_to_num(sample.reward - baseline)
                objective += advantage * own + ENTROPY * sum(path.entropy for path in paths)
                tokens += own
        assert called >= 2, client
    (line,) = metrics(folder)
    assert line["tokens_trained"] == tokens
    assert line["loss"] == pytest.approx(-objective / tokens, abs=1e-4)
    assert line["grad_norm"] > 0


def check_sample(client: str, problem: dict[str, str], sample: Sample, paths: list[Reading]) -> bool:
    """Check every episode; returns whether the policy called the tool, whose answer it then saw."""
    for path in paths:
        assert path.worst < TOLERANCE, client
        assert not path.unsampled.any()
        assert path.mask.tolist() == path.spoken(last=client == REWRITES).tolist(), f"{client}: {path.text}"
    turns = [turn for path in paths for turn in path.turns()]
    assert len(turns) == len(set(turns)), "each sampled token is in the loss once"
    assert client == REWRITES or len(paths) == 1
    said = [text.removesuffix("<eos>") for path in paths for text in path.told(sampled=True)]
    read = "".join(text for path in paths for text in path.told(sampled=False))
    calls = [(int(found[1]), int(found[2])) for text in said for found in CALLED.finditer(text)]
    for a, b in calls if sample.stop_reason in ("stop", "environment_done") else ():
        assert re.search(rf"(<tool_response>|Observation:)\n{a + b + 1000}\b", read), f"{client}: {said} {read}"
    finals = [found[1] for text in said if (found := FINAL.search(text))] if client == REWRITES else said[-1:]
    if len(finals) == 1:
        assert sample.reward == float(finals[0].strip() == problem["answer"]), f"{client}: {said}"
    return len(turns) == 2 and len(calls) == 1 and len(finals) == 1
