"""Checks that need more than one key or the disk: each problem names its key and the way out."""

import json
import os
from pathlib import Path

import msgspec
import pytest
import yaml

from common.config.checks import problems, resolve_paths
from common.config.loading import build_config, dump_yaml, load_config
from common.config.network_checks import fixed_address, is_loopback, split_address
from common.config.observing import EvaluationConfig
from common.config.parallel_layout import PLAIN
from common.config.schema import (
    BaseConfig,
    Config,
    ModelConfig,
    Reader,
    RunConfig,
    SftConfig,
    SftTasksConfig,
    TasksConfig,
)
from common.config.without_effect import without_effect
from common.errors import ConfigError
from common.security.credentials import KeyFolder
from launch.keys import make
from learner.checkpoint import export_main
from tests.rigs.configs import EXPERTS, SHAPE, document_of

REFUSED = """
learner: {world_size: 3, parallel: {tensor: 2}} | learner.world_size | a multiple of 2
learner: {world_size: 8, parallel: {tensor: 8}} | learner.parallel.tensor | 4 attention heads
learner: {world_size: 2, parallel: {expert: 2}} | learner.parallel.expert | no experts
learner: {world_size: 9007199254740992} | learner.world_size | at most 131072
learner: {groups_per_step: 9007199254740992} | learner.groups_per_step | at most 131072
learner: {lora: {rank: 9007199254740992}} | learner.lora.rank | at most 131072
rollout: {nodes: 9007199254740992} | rollout.nodes | at most 131072
rollout: {group_size: 9007199254740992} | rollout.group_size | at most 8192, since a step has 16 groups
telemetry: {sinks: [wandb, mlflow, wandb]} | telemetry.sinks | expected each tracker once, found wandb twice
telemetry: {profile_ranks: [0, 3]} | telemetry.profile_ranks | expected ranks below learner.world_size (1), found 3
learner: {moe: {balance: aux_loss}} | learner.moe.balance | no experts
learner: {moe: {balance: bias}} | learner.moe.balance | no experts
learner: {moe: {replay_routing: true}} | learner.moe.replay_routing | no experts
learner: {moe: {freeze_router: true, balance: bias}} | learner.moe.balance | frozen
tasks: {dataset: no.jsonl} | tasks.dataset | does not exist
evaluation: {datasets: [no.jsonl]} | evaluation.datasets | does not exist
evaluation: {every: 2} | evaluation.datasets | at least one dataset with evaluation.every
evaluation: {temperature: 0.001} | evaluation.temperature | 0 (greedy), or 0.01 to 2
evaluation: {temperature: 2.5} | evaluation.temperature | 0 (greedy), or 0.01 to 2
rollout: {group_size: 1} | rollout.group_size | every advantage would be zero
rollout: {max_tokens: 512} | rollout.max_tokens | max_model_len (512)
tasks: {truncated: penalized, overlong_buffer_tokens: 101} | tasks.overlong_buffer_tokens | rollout.max_tokens (100)
rollout: {engine: {max_model_len: 4096}} | rollout.engine.max_model_len | 1024
rollout: {concurrency: 4} | rollout.concurrency | rollout.group_size (8)
rollout: {temperature: 0.001} | rollout.temperature | at least 0.01
rollout: {temperature: 2.5} | rollout.temperature | at most 2
rollout: {top_p: 0.9} | rollout.top_p | biased
rollout: {top_p: 0.9} | rollout.top_p | expected 1 in training, found 0.9 (number); the
learner: {moe: {freeze_router: true}} | learner.moe.freeze_router | has no experts, found true (true or false)
rollout: {engine: {max_model_len: 512, tensor_parallel: 3}} | rollout.engine.tensor_parallel | 4 attention heads
rollout: {engine: {max_model_len: 512, max_batched_tokens: 128}} | rollout.engine.max_batched_tokens | (256), found 128
rollout: {engine: {max_model_len: 512, max_batched_tokens: 511, extra: {enable_chunked_prefill: false}}} | \
rollout.engine.max_batched_tokens | (512) without chunked prefill
learner: {loss: {objective: gspo, clip_dual: 3.0}} | learner.loss.clip_dual | unset with objective: gspo
learner: {loss: {objective: dppo_tv, clip_high: 1.5}} | learner.loss.clip_high | difference of probabilities
learner: {loss: {objective: sapo, clip_low: 0.2}} | learner.loss.clip_low | objective_options
learner: {loss: {objective: m2po}} | learner.loss.proximal | no token has moved
learner: {loss: {objective: kl_cov}} | learner.loss.proximal | behavior or loglinear with objective: kl_cov
learner: {loss: {objective: sapo, objective_options: {tau: 1}}} | learner.loss.objective_options | tau_
learner: {loss: {objective: sapo, objective_options: {tau_low: 0}}} | learner.loss.objective_options | found 0
learner: {loss: {objective_options: {tau_low: 1}}} | learner.loss.objective_options | ppo_clip has none
learner: {loss: {objective: clip_cov, objective_options: {most: 1}}} | learner.loss.objective_options | 1 and 1
learner: {loss: {advantage_options: {k: 2}}} | learner.loss.advantage_options | grpo has none
learner: {loss: {advantage: pass_at_k, advantage_options: {k: 8}}} | learner.loss.advantage_options | group_size - 1 (7)
learner: {loss: {advantage: pass_at_k, advantage_options: {k: 2.5}}} | learner.loss.advantage_options | found 2.5
learner: {loss: {advantage: gdpo}} | learner.loss.advantage_options | names of the rewards
learner: {loss: {advantage: gdpo, advantage_options: {a: 0}}} | learner.loss.advantage_options | some not 0
{tasks: {truncated: penalized}, learner: {loss: {advantage: maxrl}}} | learner.loss.advantage | near 0
{tasks: {truncated: penalized}, learner: {loss: {advantage: pass_at_k}}} | learner.loss.advantage | as a failure
learner: {dynamic_sampling: true, loss: {advantage: gdpo, advantage_options: {a: 1}}} | learner.dynamic_sampling | gdpo
learner: {loss: {proximal: behavior, correction: 'm:f'}} | learner.loss.correction | every weight is 1
learner: {loss: {correction: none, correction_cap: 2.0}} | learner.loss.correction_cap | correction: none
learner: {loss: {correction: none, correction_low: 0.5}} | learner.loss.correction_low | correction: none
learner: {loss: {correction: none, correction_level: sequence}} | learner.loss.correction_level | correction: none
learner: {loss: {correction: none, correction_normalize: true}} | learner.loss.correction_normalize | correction: none
learner: {loss: {correction: tis, correction_level: geometric}} | learner.loss.correction_level | token or sequence
learner: {loss: {correction: mis, correction_low: 3.0}} | learner.loss.correction_low | less than correction_cap (2)
learner: {loss: {correction: icepop, correction_cap: 0.4}} | learner.loss.correction_cap | (0.5) less than
learner: {loss: {correction_veto: 1.0}} | learner.loss.correction_veto | less than 1
learner: {loss: {proximal: behavior, correction: icepop}} | learner.loss.correction | every weight is 1
learner: {loss: {proximal: behavior, correction_cap: 3.0}} | learner.loss.correction_cap | with proximal: behavior
learner: {loss: {proximal: behavior, correction_veto: 0.0001}} | learner.loss.correction_veto | with proximal: behavior
learner: {loss: {reference: /models/base}} | learner.loss.reference | kl_coefficient is 0
learner: {minibatches: 17} | learner.minibatches | at most learner.groups_per_step (16), found 17
{learner: {epochs: 2, loss: {proximal: behavior, objective: cispo}}} | learner.epochs | objective: cispo
{learner: {epochs: 2, loss: {proximal: behavior, objective: m2po}}} | learner.epochs | objective: m2po
{learner: {epochs: 2, loss: {proximal: behavior, clip_low: 1, clip_high: 1000000}}} | learner.epochs | expected 1 with
{learner: {epochs: 4, loss: {proximal: loglinear, objective: m2po}}} | learner.epochs | objective: m2po
{learner: {epochs: 4, loss: {objective: kl_cov}}} | learner.epochs | kl_stop
{learner: {epochs: 4, loss: {objective: kl_cov, kl_stop: 2}}} | learner.epochs | at most 1
{learner: {epochs: 2, loss: {objective: gspo, clip_high: 0.5}}} | learner.epochs | kl_stop
{learner: {epochs: 4, loss: {proximal: loglinear, clip_low: 1, clip_high: 1000}}} | learner.epochs | expected 1 with
{learner: {epochs: 2, loss: {clip_low: 1, clip_high: 999}}} | learner.epochs | objective: ppo_clip
{learner: {epochs: 2, loss: {clip_high: 10}}} | learner.epochs | may keep its gradient
{learner: {epochs: 2, loss: {proximal: behavior, objective: 'm:f'}}} | learner.epochs | objective: m:f
{learner: {epochs: 2, loss: {objective: 'm:f', clip_high: 10}}} | learner.epochs | kl_stop
{learner: {epochs: 2, loss: {objective: cispo, clip_high: 10}}} | learner.epochs | objective: cispo
{learner: {epochs: 2, loss: {objective: gspo, clip_high: 10}}} | learner.epochs | objective: gspo
{learner: {epochs: 2, loss: {objective: clip_cov, clip_high: 10}}} | learner.epochs | objective: clip_cov
{learner: {epochs: 2, loss: {objective: dppo_kl, clip_low: 50, clip_high: 50}}} | learner.epochs | objective: dppo_kl
{learner: {epochs: 2, loss: {objective: dppo_tv, clip_high: 0.9}}} | learner.epochs | objective: dppo_tv
{learner: {epochs: 2, loss: {objective: gmpo, clip_low: 20, clip_high: 20}}} | learner.epochs | objective: gmpo
{learner: {epochs: 2, loss: {objective: sapo, objective_options: {tau_high: 0.1}}}} | learner.epochs | objective: sapo
{learner: {loss: {kl_stop: 0.1}}} | learner.loss.kl_stop | unset with one update per batch
{learner: {epochs: 2, minibatches: 2}, staleness: {max_updates: 2}} | staleness.max_updates | at least 3
{weights: {publish_every: 4}, staleness: {max: 2}} | weights.publish_every | staleness.max + 1 = 3
broker: {address: '127.0.0.1:5555'} | broker.address | tcp://HOST:PORT
broker: {address: 'tcp://127.0.0.1'} | broker.address | tcp://HOST:PORT
broker: {address: 'tcp://127.0.0.1:high'} | broker.address | tcp://HOST:PORT
broker: {address: 'tcp://127.0.0.1:99999'} | broker.address | tcp://HOST:PORT
broker: {address: 'tcp://0.0.0.0:5555'} | broker.address | loopback
broker: {address: 'tcp://10.0.0.4:5555'} | broker.address | authentication
broker: {address: 'redis://127.0.0.1:6379'} | broker.address | broker.store: redis
broker: {address: ['tcp://127.0.0.1:5', 'tcp://127.0.0.1:6']} | broker.address | broker.store: file
broker: {redis: 'redis://127.0.0.1'} | broker.redis | broker.store: redis
broker: {store: redis} | broker.redis | redis://HOST:PORT
broker: {store: redis, redis: 'rediss://10.0.0.4/0'} | broker.redis | docs/redis.md
broker: {store: redis, redis: 'redis://a:b@127.0.0.1:6379/0'} | broker.redis | credentials
broker: {store: redis, redis: 'redis://h', durability: memory} | broker.durability | everysec
broker: {store: redis, redis: 'redis://[::1]', address: ['tcp://[::1]:0', 'tcp://h:6']} | broker.address | a port
weights: {address: 0.0.0.0} | weights.address | loopback
weights: {buffers: device} | weights.buffers | transport: nccl
weights: {buffers: device, transport: nccl, encoding: delta} | weights.buffers | encoding: full
broker: {lease_s: 5.0, heartbeat_s: 2.0} | broker.lease_s | heartbeat_s
broker: {max_lease_s: 60.0} | broker.max_lease_s | sample_timeout_s
broker: {max_bytes: 10, max_message_bytes: 20} | broker.max_message_bytes | broker.max_bytes
{rollout: {group_size: 1}, learner: {loss: {advantage: rloo}}} | rollout.group_size | rloo
learner: {optimizer: {schedule: linear, warmup_steps: 9, decay_steps: 9}} | learner.optimizer.decay_steps | steps (9)
learner: {optimizer: {schedule: cosine, decay_steps: 4}} | learner.optimizer.decay_steps | at least 5, the updates
{learner: {optimizer: {schedule: linear, decay_steps: 9}, epochs: 2}} | learner.optimizer.decay_steps | at least 10
"""
PASSES = """
{}
learner: {world_size: 2, parallel: {tensor: 2}}
learner: {world_size: 2, parallel: {pipeline: 2}}
learner: {world_size: 2, parallel: {pipeline: 2, virtual_pipeline: 2}}
learner: {world_size: 2, parallel: {}}
rollout: {max_tokens: 100, engine: {max_model_len: 512, max_num_seqs: 128, max_batched_tokens: 128}}
evaluation: {temperature: 0, samples: 8}
{evaluation: {temperature: 0}, tasks: {environment: null, reward: math}}
learner: {loss: {clip_dual: 3.0}}
learner: {loss: {correction: none, correction_veto: 0.0001}}
learner: {loss: {proximal: behavior}}
learner: {loss: {proximal: behavior, correction: none, objective: cispo, clip_low: 1.0, clip_high: 4.0}}
learner: {loss: {correction: mis, correction_level: geometric, correction_low: 0.98, correction_normalize: true}}
{weights: {publish_every: 4}, staleness: {max: 3}}
{learner: {epochs: 2, minibatches: 16, loss: {kl_stop: 0.1}}, staleness: {max_updates: 31}}
{learner: {epochs: 2, loss: {proximal: behavior}}}
{learner: {epochs: 2, loss: {proximal: behavior, clip_low: 1}}}
{learner: {minibatches: 2, loss: {proximal: behavior, objective: cispo}}}
{learner: {epochs: 2, loss: {objective: cispo}}}
{learner: {epochs: 2, loss: {objective: kl_cov, kl_stop: 0.02}}}
{learner: {epochs: 2, loss: {objective: cispo, clip_high: 8}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: 'm:f', kl_stop: 1}}}
{learner: {epochs: 2, loss: {objective: 'm:f'}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: dppo_kl, clip_high: 0.2}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: dppo_tv, clip_high: 0.5}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: gmpo}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: gspo}}}
{learner: {epochs: 2, loss: {proximal: behavior, objective: sapo, objective_options: {tau_high: 0.5}}}}
{learner: {minibatches: 4, loss: {clip_low: 1, clip_high: 1000000}}}
weights: {buffers: device, transport: nccl}
broker: {address: 'tcp://127.0.0.1:0'}
broker: {address: 'tcp://localhost:5555'}
broker: {address: 'tcp://[::1]:5555'}
broker: {address: 'ipc:///tmp/b'}
learner: {dynamic_sampling: true}
{rollout: {group_size: 1}, learner: {loss: {advantage: reinforce_pp}}}
{rollout: {group_size: 1}, learner: {loss: {advantage: 'm:f', advantage_options: {any: 3}}}}
learner: {loss: {objective: sapo, objective_options: {tau_high: 2}, log_ratio_penalty: 0.001}}
learner: {loss: {objective: gmpo, proximal: behavior, reduction: sequence_mean, clip_low: 0.3}}
learner: {loss: {objective: clip_cov, clip_dual: 3.0, objective_options: {share: 0.01}}}
learner: {loss: {objective: m2po, proximal: behavior, objective_options: {moment: 0.1}}}
learner: {loss: {objective: 'm:f', objective_options: {any: 3}, clip_dual: 3.0, reduction: 'm:g', kl_estimator: 'm:h'}}
learner: {loss: {correction: 'm:f', correction_level: geometric}}
learner: {loss: {advantage: pass_at_k, advantage_options: {k: 7}}}
learner: {loss: {advantage: gdpo, advantage_options: {right: 1, short: 0.2}}}
learner: {optimizer: {warmup_steps: 20}}
learner: {optimizer: {schedule: linear, warmup_steps: 20}}
learner: {optimizer: {schedule: linear, warmup_steps: 2, decay_steps: 3, min_lr_fraction: 0.1}}
learner: {optimizer: {schedule: cosine, decay_steps: 10}}
"""
WITHOUT_EFFECT = """
learner: {optimizer: {min_lr_fraction: 0.1}} | learner.optimizer.min_lr_fraction | schedule: constant
learner: {optimizer: {decay_steps: 9}} | learner.optimizer.decay_steps | schedule: constant
{evaluation: {temperature: 0, samples: 8}, tasks: {environment: null, reward: math}} | evaluation.samples | the same
learner: {checkpoint: {keep_best: -value_loss}} | learner.checkpoint.keep_best | needs learner.critic
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    document_of(tmp_path)
    return tmp_path


def job(folder: Path, **sections: object) -> Config:
    return build_config(document_of(folder, **sections), "job.yaml")


def write_shape(model: Path, **entries: object) -> None:
    (model / "config.json").write_text(json.dumps({**SHAPE, **entries}))


def passes(folder: Path, **sections: object) -> None:
    job(folder, **sections).validate("job.yaml")


def refused(config: BaseConfig, key: str, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.validate("job.yaml")
    assert caught.value.key == key
    assert caught.value.file == "job.yaml"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("line", REFUSED.split("\n")[1:-1])
def test_settings_that_do_not_fit_together_are_refused(folder, line):
    sections, key, word = line.split(" | ")
    refused(job(folder, **yaml.safe_load(sections)), key, word)


@pytest.mark.parametrize("sections", PASSES.split("\n")[1:-1])
def test_settings_that_fit_together_pass(folder, sections):
    assert list(problems(job(folder, **yaml.safe_load(sections)))) == []


@pytest.mark.parametrize("line", WITHOUT_EFFECT.split("\n")[1:-1])
def test_keys_without_effect_are_told_and_not_refused(folder, line):
    sections, key, reason = line.split(" | ")
    config = job(folder, **yaml.safe_load(sections))
    assert list(problems(config)) == []
    [sentence] = without_effect(config)
    assert sentence.startswith(f"{key} has no effect") and reason in sentence
    assert list(without_effect(job(folder))) == []


@pytest.mark.parametrize(("dtype", "context", "plain"), [("bfloat16", 2, ""), ("float32", 1, ""), ("float32", 2, "1")])
def test_transformer_engine_has_no_float32_under_context_parallelism(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, context: int, plain: str
) -> None:
    (tmp_path / "packages" / "transformer_engine").mkdir(parents=True)
    sections = {"model": {"dtype": "float32"}, "learner": {"world_size": 2, "parallel": {"context": 2}}}
    monkeypatch.setenv(PLAIN, "")
    passes(folder, **sections)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    refused(job(folder, **sections), "model.dtype", "bfloat16 with learner.parallel.context 2", "found float32", PLAIN)
    monkeypatch.setenv(PLAIN, plain)
    passes(folder, model={"dtype": dtype}, learner={"world_size": 2, "parallel": {"context": context}})


def test_a_node_may_have_another_transport_than_a_learner_with_device_buffers(folder):
    config = job(folder, weights={"transport": "relay", "buffers": "device"})
    assert list(problems(config, "node")) == []
    assert [problem.key for problem in problems(config, "learner")] == ["weights.buffers"]


def test_experts_are_found_under_every_name(folder):
    for kind, name in {
        "qwen3_moe": "num_experts",
        "mixtral": "num_local_experts",
        "glm4_moe": "n_routed_experts",
    }.items():
        others = {key: value for key, value in EXPERTS.items() if key != "num_experts"}
        write_shape(folder / "model", **{**others, "model_type": kind, name: 4})
        passes(folder, learner={"moe": {"balance": "bias"}})
        passes(folder, learner={"world_size": 2, "parallel": {"expert": 2}})


def test_the_routing_of_a_group_must_fit_into_a_message(folder):
    write_shape(folder / "model", **EXPERTS)
    replaying = {"moe": {"replay_routing": True}}
    made = job(folder, learner=replaying)
    needed = 2 * made.rollout.group_size * made.rollout.engine.max_model_len * 4 * 2
    made.validate("job.yaml")
    small = {"max_message_bytes": needed - 1, "max_bytes": 4 << 30}
    refused(job(folder, learner=replaying, broker=small), "broker.max_message_bytes", str(needed))
    write_shape(folder / "model", **EXPERTS, mlp_only_layers=[0])  # a node records no dense layer
    job(folder, learner=replaying, broker=small).validate("job.yaml")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fp8", "quantised before"),
        ("awq", "quantised before"),
        ("mxfp8", "CPU"),
        ("fp8_per_tensor", "CPU"),
        ("fp8_per_block", "CPU"),
        ("torchao", "CPU"),
        ("compressed-tensors", "wrongly"),
        ("int8_per_channel_weight_only", "silently"),
        ("fp8_per_chanel", ""),
    ],
)
def test_kinds_of_rounding_that_vllm_has_for_others_are_refused_with_the_nearest_one(folder, kind, why):
    rollout = {"engine": {"max_model_len": 512, "quantization": kind}}
    refused(job(folder, rollout=rollout), "rollout.engine.quantization", f"'{kind}'", why, "'fp8_per_channel'?")


def test_a_folder_as_a_dataset_is_no_missing_file_and_its_shards_are_named(folder):
    shards = folder / "shards"
    (shards / "main").mkdir(parents=True)
    dataset = {"dataset": str(shards)}
    refused(job(folder, tasks=dataset), "tasks.dataset", f"{shards}, a folder", "neither *.parquet nor *.jsonl")
    (shards / "main" / "train-0.parquet").touch()
    refused(job(folder, tasks=dataset), "tasks.dataset", f"{shards}, a folder", f"{shards}/main/*.parquet")
    (shards / "b.jsonl").touch()
    refused(job(folder, tasks=dataset), "tasks.dataset", f"{shards}, a folder", f"{shards}/*.jsonl")


def test_experts_are_not_rounded(folder):
    rollout = {"engine": {"max_model_len": 512, "quantization": "fp8_per_channel"}}
    passes(folder, rollout=rollout)
    write_shape(folder / "model", **EXPERTS)
    refused(job(folder, rollout=rollout), "rollout.engine.quantization", "null for a model with experts")


def test_a_missing_model_folder_and_a_file_in_its_place_are_refused(folder):
    refused(job(folder, model={"path": str(folder / "train.jsonl")}), "model.path", "is a file")
    refused(job(folder, model={"path": str(folder / "nothing")}), "model.path", "does not exist", "slipstream sft")


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
        (lambda model: (model / "config.json").write_text("{"), "readable config.json"),
        (lambda model: write_shape(model, architectures=["Gemma2ForCausalLM"]), "Gemma2ForCausalLM"),
        (lambda model: write_shape(model, quantization_config={"bits": 4}), "quant"),
        (lambda model: write_shape(model, architectures=[[1]]), "[1] in config.json"),
        (lambda model: write_shape(model, model_type="x", architectures={"a": 1}), "model_type 'x'"),
    ],
)
def test_a_model_folder_that_cannot_be_trained_from_is_refused(folder, damage, word):
    damage(folder / "model")
    refused(job(folder), "model.path", word)
    (folder / "job.yaml").write_text(dump_yaml(job(folder)))
    with pytest.raises(ConfigError) as caught:
        export_main.run(["--config", str(folder / "job.yaml"), "--checkpoint", "none", "--out", "none"])
    assert caught.value.key == "model.path" and word in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("num_hidden_layers", 1 << 31),
        ("hidden_size", 0),
        ("num_attention_heads", 1 << 31),
        ("num_key_value_heads", 5),
        ("vocab_size", 1 << 53),
        ("mlp_only_layers", [[1]]),
        ("num_experts", 1 << 31),
        ("num_experts_per_tok", 9),
    ],
)
def test_a_shape_that_no_model_has_is_refused_before_anything_is_counted(folder, entry, value):
    named = {"architectures": ["Qwen3MoeForCausalLM"]}
    write_shape(folder / "model", **{**EXPERTS, **named, entry: value})
    refused(job(folder), "model.path", f"{entry} is {value}, expected a")
    write_shape(folder / "model", **EXPERTS, **named, first_k_dense_replace=1 << 24)
    passes(folder)


def test_what_this_user_may_not_look_at_is_refused_with_the_reason(folder):
    config, user = job(folder), os.geteuid()
    folder.chmod(0)
    if user == 0:  # root may look everywhere
        os.seteuid(65534)
    try:
        denied = {problem.key for problem in problems(config) if "Permission denied" in problem.found}
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
    assert denied == {"model.path", "tasks.dataset"}


def test_dataset_that_is_no_jsonl_is_refused(folder):
    for text in ("", "\n\n", "not json\n", "[1, 2]\n"):
        (folder / "train.jsonl").write_text(text)
        refused(job(folder), "tasks.dataset", "a JSON object on every line")


def test_the_longest_sequence_must_fit_where_it_goes_padded_for_context_parallelism(folder):
    for section, name, wrong in (("learner", "micro_batch_tokens", 510), ("weights", "canary_tokens", 512)):
        refused(job(folder, **{section: {name: wrong}}), f"{section}.{name}", "max_model_len - 1 (511)")
        passes(folder, **{section: {name: 511}})
    layout = {"world_size": 2, "parallel": {"context": 2}}
    key = "learner.micro_batch_tokens"
    refused(job(folder, learner={**layout, "micro_batch_tokens": 511}), key, "rounded up to a multiple of 4", "(512)")
    passes(folder, learner={**layout, "micro_batch_tokens": 512})


@pytest.mark.parametrize("loss", [{"correction": "mis"}, {"correction_normalize": True}, {"correction_veto": 1e-4}])
def test_an_auxiliary_loss_beside_corrections_that_drop_tokens_is_refused(folder, loss):
    def named(balance):
        config = job(folder, learner={"moe": {"balance": balance}, "loss": loss})
        return [problem.expected for problem in problems(config) if problem.key == "learner.moe.balance"]

    assert any("correction_veto" in expected for expected in named("aux_loss"))
    assert not any("correction_veto" in expected for expected in named("bias"))


def test_gdpo_knows_the_rewards_of_the_job_and_names_the_nearest(folder):
    reward = [
        {"function": "rewards:right"},
        {"function": "regex", "weight": 0.5, "options": {"pattern": "x"}, "name": "form"},
        {"function": "rewards:several", "weight": {"a": 1.0, "b": 0.5}, "name": "judged"},
    ]

    def job_with(truncated="counted", **weights):
        tasks = {"environment": None, "reward": reward, "prompt": "{question}", "truncated": truncated}
        loss = {"advantage": "gdpo", "advantage_options": weights}
        return job(folder, tasks=tasks, learner={"loss": loss})

    assert not [p for p in problems(job_with(**{"right": 1.0, "form": 0.5, "judged/a": 1.0})) if "loss" in p.key]
    refused(job_with(right=1.0, judged=1.0), "learner.loss.advantage_options", "found judged")
    refused(job_with(rihgt=1.0), "learner.loss.advantage_options", "did you mean 'right'")
    assert not [p for p in problems(job_with("penalized", right=1.0, overlong_penalty=0.5)) if "loss" in p.key]
    refused(job_with("penalized", right=1.0), "learner.loss.advantage_options", "overlong_penalty", "found none")
    refused(job_with("penalized", right=1.0, overlong_penalty=-1), "learner.loss.advantage_options", "above 0", "-1")
    refused(job_with(right=1.0, overlong_penalty=1), "learner.loss.advantage_options", "found overlong_penalty")


def test_groups_of_equal_rewards_are_not_left_out_where_they_carry_signal(folder):
    """Groups of one need reinforce_pp, and every one of them would be left out."""
    over_the_batch = {"dynamic_sampling": True, "loss": {"advantage": "reinforce_pp"}}
    for size in (1, 2):
        rollout = {"group_size": size}
        config = job(folder, rollout=rollout, learner=over_the_batch)
        refused(config, "learner.dynamic_sampling", "false", "reinforce_pp")


def test_weights_leave_the_machine_by_relay_with_keys_alone_and_redis_with_tls_besides(folder, tmp_path):
    make(KeyFolder(tmp_path / "keys"), ["n0"])
    keys = {"credentials": str(tmp_path / "keys")}
    for weights, broker in (
        ({"address": "10.0.0.4", "transport": "relay"}, {}),
        ({"address": "10.0.0.4", "transport": "gloo"}, keys),
        ({"address": "10.0.0.4", "transport": "nccl"}, keys),
    ):
        ways_out = ("weights.transport: relay", "slipstream keys", "weights.network: trusted on a private network")
        refused(job(folder, weights=weights, broker=broker), "weights.address", *ways_out)
    refused(job(folder, weights={"address": "0.0.0.0", "transport": "relay"}, broker=keys), "weights.address", "reach")
    passes(folder, weights={"address": "10.0.0.4", "transport": "relay"}, broker=keys)
    redis = {"store": "redis", **keys}
    refused(job(folder, broker={**redis, "redis": "redis://10.0.0.4:6379/0"}), "broker.redis", "TLS")
    passes(folder, broker={**redis, "redis": "rediss://10.0.0.4:6379/0"})


@pytest.mark.parametrize("transport", ["gloo", "nccl", "relay"])
def test_a_trusted_network_lets_every_transport_leave_the_machine_with_keys(folder, tmp_path, transport):
    make(KeyFolder(tmp_path / "keys"), ["n0"])
    keys = {"credentials": str(tmp_path / "keys")}
    trusted = {"transport": transport, "network": "trusted"}
    away, several = {**trusted, "address": "10.0.0.4"}, {"machines": 2, "world_size": 2}
    passes(folder, weights=trusted)
    passes(folder, weights=away, broker=keys)
    without = ("slipstream keys", "only the data of gloo and nccl is in the clear")
    refused(job(folder, weights=away), "broker.credentials", *without)
    refused(job(folder, weights={**trusted, "address": "0.0.0.0"}, broker=keys), "weights.address", "reach")
    passes(folder, weights=trusted, broker=keys, learner=several)
    passes(folder, weights=away, broker=keys, learner=several)
    refused(job(folder, weights=trusted, learner=several), "broker.credentials", "several machines", *without)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_an_untrusted_network_gives_the_weights_of_several_machines_to_the_relay(folder, tmp_path, transport):
    make(KeyFolder(tmp_path / "keys"), ["n0"])
    keys, several = {"credentials": str(tmp_path / "keys")}, {"machines": 2, "world_size": 2}
    words = ("relay, with a key folder", "several machines", "weights.network: trusted on a private network")
    refused(job(folder, weights={"transport": transport}, broker=keys, learner=several), "weights.transport", *words)
    refused(job(folder, weights={"transport": "relay"}, learner=several), "weights.transport", words[0])
    passes(folder, weights={"transport": "relay"}, broker=keys, learner=several)


@pytest.mark.parametrize("address", ["redis://127.0.0.1:6379/0", "rediss://localhost", "unix:///run/redis.sock?db=1"])
def test_local_redis_addresses_pass_and_clients_get_all_brokers(folder, address):
    brokers = ["tcp://127.0.0.1:5", "tcp://127.0.0.1:6"]
    config = job(folder, broker={"store": "redis", "redis": address, "address": brokers})
    config.validate("job.yaml")
    assert fixed_address(config) == ",".join(brokers)


def test_the_former_key_is_refused_with_the_new_ones(folder):
    config = folder / "old.yaml"
    config.write_text(dump_yaml(job(folder)).replace("  store: file\n", "  backend: redis\n"))
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert caught.value.key == "broker.backend"
    assert {"broker.store:", "broker.redis"} <= set((caught.value.hint or "").split())


def test_addresses_are_split_and_only_those_that_say_where_to_connect_to_are_fixed(folder):
    assert split_address("tcp://[::1]:7") == ("::1", 7)
    assert split_address("ipc:///tmp/x") == ("", None)
    assert is_loopback("127.8.0.1")
    assert not is_loopback("example.org")
    for address, fixed in (
        ("tcp://127.0.0.1:0", None),
        ("tcp://0.0.0.0:5555", None),
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("ipc:///tmp/b", "ipc:///tmp/b"),
    ):
        assert fixed_address(job(folder, broker={"address": address})) == fixed


def test_warm_start_is_checked_too(folder):
    run, model = RunConfig(name="warm", dir="x", steps=1), ModelConfig(path=str(folder / "model"))
    config = SftConfig(run=run, model=model, tasks=SftTasksConfig(dataset=str(folder / "train.jsonl")))
    config.validate("job.yaml")
    refused(msgspec.structs.replace(config, tasks=SftTasksConfig(dataset="nowhere")), "tasks.dataset")


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(
        run=RunConfig(name="a", dir="runs/a", steps=1),
        model=ModelConfig(path="~/model"),
        tasks=TasksConfig(environment="addition", dataset="../d.jsonl"),
        evaluation=EvaluationConfig(datasets=["e.jsonl", "hf://datasets/o/n/f.jsonl"]),
    )
    resolved = resolve_paths(config)
    assert resolved.run.dir == str(tmp_path / "runs/a")
    assert resolved.model.path == str(Path.home() / "model")
    assert resolved.tasks.dataset == str(tmp_path.parent / "d.jsonl")
    assert resolved.evaluation.datasets == [str(tmp_path / "e.jsonl"), "hf://datasets/o/n/f.jsonl"]


def test_a_reference_model_is_a_folder_with_config_and_weights(folder, monkeypatch):
    def referring_to(name):
        return job(folder, learner={"loss": {"reference": name, "kl_coefficient": 0.1}})

    monkeypatch.chdir(folder)
    config = resolve_paths(referring_to("model"))
    assert config.learner.loss.reference == str(folder / "model")
    config.validate("job.yaml")
    refused(referring_to("nowhere"), "learner.loss.reference", "config.json")
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text("{}")
    refused(referring_to("empty"), "learner.loss.reference", "safetensors")


@pytest.mark.parametrize(
    ("reader", "needed"),
    [
        ("broker", ()),
        ("node", ("model.path", "tasks.limits.python")),
        ("learner", ("model.path", "tasks.dataset", "learner.loss.reference")),
        (
            "all",
            ("model.path", "tasks.dataset", "evaluation.datasets", "learner.loss.reference", "tasks.limits.python"),
        ),
    ],
)
def test_a_role_needs_only_the_files_that_it_reads(folder: Path, reader: Reader, needed: tuple[str, ...]) -> None:
    sections = {
        "model.path": {"model": {"path": "/nowhere"}},
        "tasks.dataset": {"tasks": {"dataset": "/nowhere/a.jsonl"}},
        "evaluation.datasets": {"evaluation": {"datasets": ["/nowhere/b.jsonl"]}},
        "tasks.limits.python": {"tasks": {"limits": {"python": "/nowhere/python"}}},
        "learner.loss.reference": {"learner": {"loss": {"reference": "/nowhere", "kl_coefficient": 0.1}}},
    }
    for key, section in sections.items():
        config = job(folder, **section)
        if key not in needed:
            config.validate("job.yaml", reader)
            continue
        with pytest.raises(ConfigError) as caught:
            config.validate("job.yaml", reader)
        assert caught.value.key == key


def test_a_learner_needs_the_held_out_problems_only_if_it_evaluates(folder: Path) -> None:
    told = {"datasets": ["/nowhere/b.jsonl"]}
    job(folder, evaluation=told).validate("job.yaml", "learner")
    with pytest.raises(ConfigError) as caught:
        job(folder, evaluation=told | {"every": 1}).validate("job.yaml", "learner")
    assert caught.value.key == "evaluation.datasets" and "/nowhere/b.jsonl" in caught.value.found


def test_versions_that_are_evaluated_are_published_and_datasets_differ(folder: Path) -> None:
    (folder / "held.jsonl").write_text('{"a": 1}\n')
    told = {"datasets": [str(folder / "held.jsonl")], "every": 6}
    job(folder, evaluation=told, weights={"publish_every": 3}).validate("job.yaml")
    bad = job(folder, evaluation=told, weights={"publish_every": 4}, staleness={"max": 3})
    refused(bad, "evaluation.every", "a multiple of weights.publish_every (4)")
    twice = job(folder, evaluation={"datasets": told["datasets"] * 2})
    refused(twice, "evaluation.datasets", "every dataset once")
