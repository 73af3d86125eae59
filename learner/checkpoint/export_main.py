"""`python -m learner.checkpoint.export_main --config FILE --checkpoint DIR --out DIR [--adapter | --critic]`: a folder.

It is one process under any layout of the checkpoint. It builds the model on one rank, loads only the weights, and
writes them beside the configuration and tokenizer of model.path.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from common.config.checks import downloaded, model_folder_problems, resolve_paths
from common.config.converted import is_converted, read_converted
from common.config.loading import load_either
from common.config.schema import LearnerConfig, MoeConfig, ParallelConfig
from common.errors import ConfigError
from common.hub import SCHEME
from common.process.lifecycle import leave
from common.process.progress import counted
from common.process.run_dir import RunDir
from learner.checkpoint.folder import MODEL_FOLDER
from learner.rank_process import RankProcess, guard

logger = logging.getLogger(__name__)


def run(arguments: Sequence[str]) -> int:
    """Write the folder, complete or not at all.

    Raises UsageError when model.path is no usable model, or the checkpoint is not one of it.
    """
    parser = argparse.ArgumentParser(prog="python -m learner.checkpoint.export_main")
    parser.add_argument("--config", type=Path, required=True, help="the run's config.yaml")
    parser.add_argument("--checkpoint", type=Path, required=True, help="RUN/checkpoints/step-N")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, for Hugging Face's peft")
    parser.add_argument("--critic", action="store_true", help="the value model beside the policy")
    words = parser.parse_args(arguments)
    named = load_either(words.config)
    config = downloaded(resolve_paths(named), "node")
    for problem in model_folder_problems(config.model.path):
        raise ConfigError.of(str(words.config), problem)
    RankProcess("export", RunDir(words.config.parent), config.learner.threads, config.telemetry.log_level)
    import learner.megatron.backend  # noqa: F401  (after the checks: takes seconds, and prepares for megatron)
    from learner.megatron import checkpoint, critic, parallel, start_weights
    from learner.megatron.conversion.export import Exporter, write_folder
    from learner.megatron.conversion.hf_folder import read_config
    from learner.megatron.conversion.model import DTYPES, build
    from learner.megatron.lora import Adapters

    source = Path(config.model.path)
    alone = ParallelConfig()
    hf_config = read_config(source)
    parallel.initialize(alone, seed=0, timeout_s=LearnerConfig().timeout_s)
    built = build(source, hf_config, DTYPES[config.model.dtype], alone, MoeConfig())
    if words.critic:
        critic.give_heads(built)
        checkpoint.load_weights(words.checkpoint / MODEL_FOLDER / critic.FOLDER, built.chunks, alone)
        critic.save(built, source, words.out)
    else:
        if config.learner.lora is not None:  # the checkpoint has the adapters alone
            start_weights.load(source, built, alone)
        adapters = Adapters(built, config.learner.lora, source, config.run.seed)
        checkpoint.load_weights(words.checkpoint / MODEL_FOLDER, built.chunks, alone, adapters.identity)
        if words.adapter:
            name = read_converted(source).source if is_converted(source) else named.model.path
            adapters.save(words.out, name.removeprefix(SCHEME).partition("@")[0] if name.startswith(SCHEME) else name)
        else:
            names = built.bridge.hf_pretrained.state.source.get_all_keys()
            tensors = counted(Exporter(built, adapters).tensors(), len(names), "export", "tensors")
            write_folder(source, words.out, tensors)
    parallel.shutdown()
    logger.info("%s is written to %s", words.checkpoint, words.out)
    return 0


if __name__ == "__main__":
    leave(guard(run, sys.argv[1:]))
