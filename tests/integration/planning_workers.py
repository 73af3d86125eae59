"""The ranks behind test_planning.py: what real Megatron-Core holds, and how it groups its ranks, as JSON.

The process rig is that of megatron_workers.py.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig, ParallelConfig
from tests.integration import architecture_models, fork_rig
from tests.integration import megatron_workers as rig


def job_model(folder: Path, spec: dict[str, Any]) -> None:
    """A Hugging Face folder of one kind."""
    path = folder / "models" / spec["kind"]
    architecture_models.new_model(spec["kind"]).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")


def job_measure(folder: Path, spec: dict[str, Any]) -> None:
    """This rank's parameters by name, and the bytes of its buffers and optimizer states after one step."""
    from megatron.core import parallel_state as mpu

    from learner.megatron.backend import MegatronBackend

    model = ModelConfig(path=str(folder / "models" / spec["kind"]), dtype=spec["dtype"], verify=False)
    learner = LearnerConfig(parallel=ParallelConfig(**spec["parallel"]), optimizer=OptimizerConfig(lr=1e-3))
    backend = MegatronBackend(model, learner, total_steps=2)
    backend.train_step(rig._share(backend, 0), rig.policy_loss, entropy=True)
    result: dict[str, Any] = {"stage": mpu.get_pipeline_model_parallel_rank(), "chunks": []}
    for chunk in backend.chunks:
        named = [[name, parameter.numel()] for name, parameter in chunk.module.named_parameters()]
        buffers = {"dense": chunk.buffers, "experts": chunk.expert_parallel_buffers}
        parameters = {k: sum(b.param_data.nbytes for b in v) for k, v in buffers.items()}
        gradients = {k: sum(b.grad_data.nbytes for b in v) for k, v in buffers.items()}
        result["chunks"].append({"named": named, "parameters": parameters, "gradients": gradients})
    result["optimizer"] = sum(_optimizer_bytes(o) for o in backend.optimizer.megatron.chained_optimizers)
    if spec["ranks"] == 1:
        path = folder / "checkpoints" / spec["name"]
        backend.start_checkpoint(path)
        backend.checkpoint_done(wait=True)
        result["checkpoint"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    fork_rig.write(folder / spec["name"], backend.rank, {}, result)


def _optimizer_bytes(optimizer: Any) -> int:
    """Adam's two states, and the main parameters that are not views of the model's."""
    if optimizer.optimizer is None:  # no parameters of this kind on the rank
        return 0
    states = [state[name] for state in optimizer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    mains = [p for group in optimizer.shard_fp32_from_float16_groups for p in group if p is not None]
    return sum(tensor.nbytes for tensor in [*states, *mains])


def job_groups(folder: Path, spec: dict[str, Any]) -> None:
    """Megatron's own rank groups and layers, from functions that need no process group."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    p, world = ParallelConfig(**spec["parallel"]), spec["world"]
    data, expert_data = world // p.model_ranks, world // (p.pipeline * p.expert * p.expert_tensor)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=p.tensor, ep=1, dp=data, pp=p.pipeline, cp=p.context, order=order)
    sparse = RankGenerator(tp=p.expert_tensor, ep=p.expert, dp=expert_data, pp=p.pipeline, cp=1, order=order)
    groups = {name: dense.get_ranks(token) for name, token in spec["dense"].items()}
    groups |= {name: sparse.get_ranks(token) for name, token in spec["sparse"].items()}
    virtual = p.virtual_pipeline if p.virtual_pipeline > 1 else None
    config = SimpleNamespace(
        num_layers=spec["layers"],
        pipeline_model_parallel_size=p.pipeline,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=p.first_stage_layers,
        num_layers_in_last_pipeline_stage=p.last_stage_layers,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    chunks = []
    for stage in range(p.pipeline):
        chunks.append([])
        for v in range(p.virtual_pipeline):
            at = get_transformer_layer_offset(config, v if virtual else None, stage)
            size = get_num_layers_to_build(config, v if virtual else None, stage)
            chunks[-1].append([at, at + size])
    (folder / f"{spec['name']}.json").write_text(json.dumps({"groups": groups, "chunks": chunks}))


JOBS = rig.JOBS | {"model": job_model, "measure": job_measure, "groups": job_groups}
