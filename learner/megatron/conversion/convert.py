"""`slipstream convert`: a Hugging Face folder to one whose weights the learner reads without converting them."""

from pathlib import Path

from common.config.converted import MANIFEST, WEIGHTS, Converted, config_digest
from common.config.schema import MoeConfig, ParallelConfig
from common.process.files import pretty_json
from learner.megatron import checkpoint, parallel, start_weights
from learner.megatron.conversion import hf_folder, verify
from learner.megatron.conversion.model import DTYPES, build
from learner.megatron.moe import Experts
from learner.megatron.schedule import Schedule


def convert(source: Path, target: Path, checked: bool = True) -> Converted:
    """Write the folder `target`, complete or not at all; what common/config/converted.py says is in it.

    It runs on one rank, after learner.megatron.parallel.initialize, and takes the host memory of the stored weights.
    Their type keeps every value of the source. `checked`: with the forward check, whose results the folder keeps.
    Raises UsageError for a model that cannot be trained, SlipstreamError or OSError when it cannot be written.
    """
    alone = ParallelConfig()
    hf_config = hf_folder.read_config(source)
    stored = hf_folder.stored_dtype(source)
    dtype = DTYPES[stored]
    if checked:
        verify.check_translation(source, hf_config, dtype, alone)
    model = build(source, hf_config, dtype, alone, MoeConfig())
    start_weights.load(source, model, alone)
    forward = None
    if checked:
        experts = Experts(model.chunks, model.config, MoeConfig())
        schedule = Schedule(model.chunks, model.config, parallel.device(), experts)
        forward = verify.check_weights(source, hf_config, dtype, schedule.logprobs, rounded=True)
    with hf_folder.new_folder(target) as staging:
        hf_folder.copy_companions(source, staging)
        weights = staging / WEIGHTS
        checkpoint.save_weights(weights, model.chunks[0])
        made = Converted(
            source=str(source),
            dtype=stored,
            config=config_digest(staging),
            weights=hf_folder.weights_digest(source),
            names=model.bridge.hf_pretrained.state.source.get_all_keys(),
            files={file.name: file.stat().st_size for file in weights.iterdir()},
            forward=forward,
        )
        (weights / MANIFEST).write_bytes(pretty_json(made))
    return made
