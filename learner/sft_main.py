"""`python -m learner.sft_main --config FILE [key=value ...]`: one rank of a supervised warm start."""

import sys
from collections.abc import Sequence
from pathlib import Path

from common.config import SftConfig
from common.config_checks import check_config, resolve_paths
from common.config_loading import load_config
from common.lifecycle import leave
from common.metrics import MetricsWriter
from common.run_dir import RunDir
from learner.process import RankProcess, guard, parse_arguments
from learner.sft import run_sft
from learner.sft_data import SftDataset, load_tokenizer


def run(arguments: Sequence[str]) -> int:
    """Train and write RUN/model; raises SlipstreamError (exit code 1) or UsageError (exit code 2)."""
    words = parse_arguments("learner.sft_main", arguments)
    config = resolve_paths(load_config(words.config, words.overrides, SftConfig))
    check_config(config, str(words.config))
    run_dir = RunDir(config.run.dir)
    process = RankProcess.start("sft", run_dir, config.learner.threads, config.telemetry.log_level)
    if process.is_lead:
        run_dir.prepare(config)
    tokenizer = load_tokenizer(Path(config.model.path))
    dataset = SftDataset(Path(config.tasks.dataset), tokenizer, config.run.seed, config.tasks.shuffle)

    from learner.megatron.backend import MegatronBackend  # after the checks: it takes seconds to import
    from learner.trainer import save_model

    backend = MegatronBackend.of(config)
    process.drain_on_signals()
    metrics = MetricsWriter(run_dir.metrics) if process.is_lead else None
    run_sft(config, backend, dataset, metrics, process.stop_requested)
    save_model(backend, run_dir.model, process.is_lead)
    backend.close()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one rank; errors are logged."""
    return guard(run, sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    leave(main())
