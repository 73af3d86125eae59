"""slipstream sweep CONFIG key=a,b,c: runs of one config with different values, one report, and a winner; docs/sweep.md.

Every run has a folder in DIR and is a child process, `slipstream up` or `slipstream sft`, one after another. With
--slurm each is submitted as `slipstream slurm` does it. The same command continues what was interrupted.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import msgspec

from common.config.checks import resolve_paths
from common.errors import EXIT_DONE, EXIT_FAILED, SlipstreamError, UsageError
from common.hub import absolute
from common.process.lifecycle import SUPERVISOR_ENV, DrainFlag
from common.process.lock_file import only_one
from common.process.run_dir import RunDir, write_json
from launch.certificates import standing
from launch.cluster.slurm.jobs import read_jobs, slurm, tasks_of
from launch.cluster.slurm.submit import choices, prepared, submit_run
from launch.observe.job_view import say
from launch.observe.observation import finished_version
from launch.resolve_target import any_config_of
from launch.results.report import format_figure, write_report
from launch.sweep.arms import Entry, Planned, combined, name_of, plan
from launch.sweep.winner import Arm, Decision, Rule, Score, State, decide, parse_rule, value_by
from launch.up.roles import role_command
from launch.up.supervisor import describe_exit

POLL_S = 0.2
VERDICTS = {
    "clear": "winner: {best}; each of its seeds is better than every seed of the other arms",
    "one_seed": "winner: {best}; it or the next arm has one seed, so the spread is unknown",
    "incomplete": "no clear winner: {best} is ahead, but a seed of it has no value, or others have not finished",
    "within_spread": "no clear winner: {best} has the best mean, but its seeds overlap with those of another arm",
    "tie": "no winner: the means of {best} are equal",
    "alone": "no winner: only {best} has a value",
    "no_values": "no winner: no finished run has a value",
}


class Sweep(msgspec.Struct):
    """DIR/sweep.json: the runs of the newest command, its rule, and the exit codes of the runs that failed."""

    rule: Rule
    runs: list[Entry]
    failed: dict[str, int] = {}


def command(args: argparse.Namespace) -> int:
    """Run or submit the runs, or only report. Raises UsageError before anything starts when one of them cannot run."""
    if (args.config is None) == (args.report is None) or (args.report is not None and args.overrides):
        raise UsageError("expected CONFIG and key=a,b,c words, or --report DIR")
    if (args.dry_run or args.sbatch or args.setup or args.container) and not args.slurm:
        raise UsageError("--dry-run, --sbatch, --setup and --container belong to --slurm")
    with redirect_stdout(sys.stderr if args.json else sys.stdout):
        code, folder = (EXIT_DONE, Path(args.report)) if args.report is not None else run(args)
        outcome = summed_up(folder, args.winner)
    if args.json:
        print(msgspec.json.encode(outcome).decode())
    return code


def run(args: argparse.Namespace) -> tuple[int, Path]:
    """Run or submit all; returns the exit code and the sweep's folder. Raises as `command`."""
    if args.slurm and not args.dry_run:
        slurm("sbatch", "--version")
    chosen = choices(args)
    texts, first = combined(args.config, args.overrides, args.seeds)
    folder = Path(absolute("--dir", args.dir or f"{resolve_paths(first).run.dir}-sweep"))
    runs = plan(args.config, texts, folder, args.slurm)
    sweep = Sweep(parse_rule(args.winner, first), [each.entry for each in runs])
    with only_one(folder / "sweep.lock", "runs this sweep"):
        write_json(folder / "sweep.json", sweep)
        if not args.slurm:
            stopped = run_all(runs, sweep, args)
            write_json(folder / "sweep.json", sweep)
            return EXIT_DONE if stopped or all(map(is_finished, runs)) else EXIT_FAILED, folder
        for each in runs:
            if not args.dry_run and not is_finished(each) and (tasks := tasks_of(read_jobs(each.run).ids)):
                print(f"{each.entry.name}: its jobs {' '.join(task.id for task in tasks)} have not ended")
            else:
                submit_run(*prepared(args.config, each.overrides), chosen, args.dry_run)
    return EXIT_DONE, folder


def run_all(runs: Sequence[Planned], sweep: Sweep, args: argparse.Namespace) -> bool:
    """Run those that are not finished; returns whether this process was told to stop."""
    children: list[subprocess.Popen[bytes]] = []
    flag = DrainFlag.install(on_second=lambda: children[-1].kill() if children else None)
    for number, each in enumerate(runs, 1):
        name = f"run {number} of {len(runs)}, {each.entry.name}"
        if is_finished(each):
            say(f"{name}: finished before")
            continue
        each.run.prepare(each.config)
        standing(each.config, args.config).keep(each.run)
        say(f"{name}: {'continues' if each.run.metrics.exists() else 'starts'} in {each.run.path}")
        children.append(start(each, args))
        while (code := children[-1].poll()) is None:
            if flag.wait(POLL_S):
                children[-1].terminate()
                children[-1].wait()
        if flag.is_set:
            say(f"{flag.reason}: stopped; the same command continues the sweep")
            return True
        if code:
            sweep.failed[each.entry.name] = code
        say(f"{name}: {'finished' if is_finished(each) else 'not finished'}, {describe_exit(code)}")
    return False


def start(each: Planned, args: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """A child with a process group of its own: Ctrl-C reaches this process alone. The child ends with this process."""
    options = {"--plain": args.plain, "--share-gpus": args.share_gpus} if each.config.rl else {}
    role = "up" if each.config.rl else "sft"
    words = role_command([role, str(each.run.config), *(word for word, wanted in options.items() if wanted)])
    env = {**os.environ, SUPERVISOR_ENV: str(os.getpid())}
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stdout, env=env, process_group=0)


def is_finished(each: Planned) -> bool:
    return finished_version(each.run, each.config.run.steps) is not None


# ---------------------------------------------------------------- the outcome


def summed_up(folder: Path, word: str | None) -> dict[str, object]:
    """Write the report into DIR/report; print it, the arms and the verdict by the sweep's rule, or by that of `word`.

    Returns the document of --json. Raises UsageError when DIR is not the folder of a sweep.
    """
    try:
        sweep = msgspec.json.decode((folder / "sweep.json").read_bytes(), type=Sweep)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{folder} is not the folder of a sweep: {error}") from None
    runs = {entry.name: RunDir(folder / entry.name) for entry in sweep.runs}
    configs = {name: config for name, run in runs.items() if (config := any_config_of(run)) is not None}
    rule = parse_rule(word, next(iter(configs.values()))) if word and configs else sweep.rule
    arms: dict[str, tuple[Entry, list[Score]]] = {}
    for entry in sweep.runs:
        config = configs.get(entry.name)
        value = None
        state: State = "failed" if entry.name in sweep.failed else "unfinished" if config else "not_started"
        if config is not None and finished_version(runs[entry.name], config.run.steps) is not None:
            state = "finished"
            value = value_by(rule, runs[entry.name], config)
        score = Score(entry.name, entry.seed, state, value)
        arms.setdefault(name_of(entry.values) or "all", (entry, []))[1].append(score)
    found = [Arm.of(name, entry.values, scores) for name, (entry, scores) in arms.items()]
    page = side_by_side([str(runs[name].path) for name in configs], folder / "report")
    decision = decide(found, rule)
    print(*sentences(found, rule, decision), sep="\n", flush=True)
    document = {"dir": str(folder), "rule": rule, "arms": found, "decision": decision}
    return {**document, "failed": sweep.failed, "report": page}


def side_by_side(runs: Sequence[str], folder: Path) -> str | None:
    """The page of the report; None when there is nothing to report yet, or no package that draws it."""
    try:
        if runs:
            write_report(runs, str(folder))
            return str(folder / "report.html")
    except SlipstreamError as error:
        print(f"no report: {error}")
    return None


def sentences(arms: Sequence[Arm], rule: Rule, decision: Decision) -> list[str]:
    """The rule, a line for each arm and for each run without a value, and the verdict."""
    of_a_run = f"the mean of the last {rule.last}" if rule.last else "the best value"
    lines = [f"{rule.metric} ({rule.better}): {of_a_run} of each finished run, and its mean over the seeds of an arm"]
    for arm in arms:
        mean, least, largest = map(format_figure, (arm.mean, arm.least, arm.largest))
        known = sum(run.value is not None for run in arm.runs)
        lines.append(f"  {arm.name}: {mean} ({least} to {largest}; {known} of {len(arm.runs)} seeds)")
        lines += [
            f"    {run.name} has no value: {run.state.replace('_', ' ')}" for run in arm.runs if run.value is None
        ]
    return [*lines, VERDICTS[decision.verdict].format(best=" and ".join(decision.best))]
