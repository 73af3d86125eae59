"""slipstream certify CONFIG: prove layout, adapters, critic, loss and precision of a job in miniature, on CPU ranks.

Ranks are processes over gloo, on this machine. This process runs transformers, compares, and writes the certificate
when every check has passed; docs/certificates.md says what it proves and what not.
Exit codes: 0 proven, 1 a check failed or a rank did, 2 bad input.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from common.config.certificate import Certificate, Check, covered, fold
from common.config.checks import problems, resolve_paths
from common.config.loading import load_either
from common.config.loss import plugins as loss_plugins
from common.config.schema import BaseConfig
from common.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, ConfigError, SlipstreamError, UsageError
from common.process.install import need_packages
from common.process.progress import bar
from common.process.run_dir import source_revision, unwritable, write_json
from common.process.versions import learner_digest, versions
from launch.certificates import VERSIONS, place, read_model, shape_folder
from launch.cluster.interface import keep_gloo_here
from learner.loss import plugins

WORLD_S = 900.0  # for the ranks of one trial; up to half a minute is usual on two cores
POLL_S = 0.05


def command(args: argparse.Namespace) -> int:
    """Certify a config, line by line; the file is written when every check has passed, and else removed."""
    config = resolve_paths(load_either(Path(args.config), args.overrides))
    source, _ = shape_folder(config, args.config)
    document = read_model(source)
    check(config, args.config, source)
    need_packages("learner")
    target = Path(args.out) / f"{Path(args.config).stem}.json" if args.out else place(args.config)
    folded = fold(config.learner)
    began = time.monotonic()
    tell(f"layout: {folded.ranks} CPU rank{'s' * (folded.ranks > 1)}; {', '.join(folded.said) or 'nothing is folded'}")
    try:
        target.unlink(missing_ok=True)  # whatever ends the proof, an old certificate does not stand for it
    except OSError as error:
        raise unwritable("--out", target.parent, error) from error
    found = [*prove(config, source)]
    took_s = time.monotonic() - began
    if failed := [one for one in found if not one.passed]:
        tell(f"not proven: {len(failed)} of {len(found)} checks failed, {took_s:.0f} s; no certificate was written")
        return EXIT_FAILED
    commit, modified = source_revision()
    here = versions()
    certificate = Certificate(
        config=Path(args.config).stem,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        commit=commit,
        modified=modified,
        versions={name: here[name] for name in VERSIONS},
        source=learner_digest(),
        covers=covered(config, document),
        folded=folded.said,
        ranks=folded.ranks,
        took_s=round(took_s, 1),
        checks=found,
    )
    try:
        write_json(target, certificate)
    except OSError as error:
        raise unwritable("--out", target.parent, error) from error
    tell(f"proven: {len(found)} checks, {took_s:.0f} s; {target}")
    return EXIT_DONE


def tell(line: str) -> None:
    print(line, flush=True)


def check(config: BaseConfig, file: str, source: Path) -> None:
    """Raise ConfigError for a model or a learner that a launch would refuse; data and machines do not matter here."""
    shaped = replace(config, model=replace(config.model, path=str(source)))
    for problem in problems(shaped):
        if problem.kind == "value" and problem.key.split(".")[0] in ("model", "learner"):
            raise ConfigError.of(file, problem)
    if config.rl is not None and loss_plugins(config.rl):
        for problem in plugins.ask(config.rl):
            raise ConfigError.of(file, problem)


def prove(config: BaseConfig, source: Path) -> Iterator[Check]:
    """Every check, as soon as it is done; `source` has the model's config.json. Takes seconds to import torch."""
    import torch
    import transformers

    from learner.certificate.checks import CHECKS, Evidence
    from learner.certificate.trial import prepare, trials

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    planned, done = trials(config), count(1)
    whole = bar("certify", 1 + len(planned) + len(CHECKS), "parts")
    with tempfile.TemporaryDirectory(prefix="slipstream-") as name, whole as show:
        folder = Path(name)
        prepare(folder, config, source)
        tell("miniature: made, and run in Hugging Face transformers")
        show(next(done))
        for trial in planned:
            began = time.monotonic()
            ranks = 1 if trial.alone else fold(config.learner).ranks
            run_world(folder, trial.name, ranks)
            what = f"{ranks} rank{'s' * (ranks > 1)}, {trial.dtype}"
            tell(f"megatron: {what}, {time.monotonic() - began:.0f} s")
            show(next(done))
        evidence = Evidence(folder)
        for part in CHECKS:
            for one in part(evidence):
                tell(f"{'proven' if one.passed else 'FAILED'}: {one}")
                yield one
            show(next(done))


def run_world(folder: Path, name: str, ranks: int) -> None:
    """Run the ranks of one trial. Raises UsageError or SlipstreamError, as the first that failed; they say why."""
    with _world(folder, name, ranks) as running:
        end = time.monotonic() + WORLD_S
        waiting = [*running]
        while waiting:
            for rank in [rank for rank in waiting if rank.poll() is not None]:
                waiting.remove(rank)
                if rank.returncode:
                    kind: type[SlipstreamError] = UsageError if rank.returncode == EXIT_USAGE else SlipstreamError
                    raise kind(f"rank {running.index(rank)} of {ranks} ended with exit code {rank.returncode}")
            if time.monotonic() > end:
                raise SlipstreamError(f"{len(waiting)} of {ranks} ranks still ran after {WORLD_S:g} s")
            time.sleep(POLL_S)


@contextmanager
def _world(folder: Path, name: str, ranks: int) -> Iterator[Sequence["subprocess.Popen[bytes]"]]:
    shared = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(ranks), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    shared |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    keep_gloo_here(shared)
    words = [sys.executable, "-P", "-m", "learner.certificate.rank", str(folder), name, str(os.getpid())]
    running: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(subprocess.Popen(words, env=shared | own, stdin=subprocess.DEVNULL))
        yield running
    finally:
        for rank in running:
            rank.kill()
        for rank in running:
            rank.wait()
