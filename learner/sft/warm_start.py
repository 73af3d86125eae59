"""A supervised warm start on one rank of the learner: rows in, RUN/model out, no broker and no fleet."""

from pathlib import Path

from common.config.schema import SftConfig
from common.process.run_dir import RunDir
from learner.backend_protocol import Backend
from learner.loop.batch_source import BatchSource
from learner.loop.resume import Resume, find_start
from learner.loop.run_files import RunFiles
from learner.rank_process import RankProcess
from learner.sft.rows import SftDataset, load_tokenizer


class WarmStart:
    """See learner.main.Job."""

    def __init__(self, config: SftConfig, run_dir: RunDir, process: RankProcess) -> None:
        """Read and check the rows, on every rank; raises UsageError."""
        self._config, self._run_dir, self._process = config, run_dir, process
        tasks = config.tasks
        self._dataset = SftDataset(
            Path(tasks.dataset), load_tokenizer(Path(config.model.path)), config.run.seed, tasks.shuffle
        )
        self.files: RunFiles | None = None

    def prepare(self) -> Resume:
        self._run_dir.prepare(self._config)
        self.files = files = RunFiles(self._run_dir, self._config.learner.checkpoint.keep)
        resume, _ = find_start(self._config, self._run_dir, files.checkpoints, files.events, self._dataset.digest)
        files.begin(resume)
        return resume

    def source(self, backend: Backend, resume: Resume) -> BatchSource:
        from learner.sft.row_source import RowSource

        if self.files is not None:
            self.files.open_metrics(resume.version)
        return RowSource(self._config, self._dataset, self._process.stop_requested)

    def report_silence(self, ranks: str) -> None:
        """A warm start has no reporter; the log of the rank that ends says it."""

    def close(self, state: str, version: int, reason: str = "") -> None:
        if self.files is not None:
            self.files.close(state, version, reason)
