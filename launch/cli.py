"""The `slipstream` command: what it accepts, and which module does it. Commands are imported when they are used.

Exit code 0 is success, 1 a failure at run time, and 2 a bad config or bad usage, with one line on stderr.
Exit code 3 is a failure that a restart of the same role would meet again.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from common.errors import EXIT_FAILED, EXIT_USAGE, SlipstreamError
from common.process.lifecycle import join_supervisor, leave

DESCRIPTION = """Asynchronous GRPO: a Megatron learner, an elastic fleet of vLLM nodes and a broker between them.

CONFIG is a YAML file; key.path=value words after it override single keys, for example
  slipstream up configs/quickstart.yaml run.seed=2 staleness.max=0
RUN is the folder of a run (run.dir), or the config file that names it. ADDRESS is its broker's, tcp://HOST:PORT.
In the repository docs/README.md lists the pages, docs/config.md every key."""

HANDLERS = {
    "up": "launch.up.up:command",
    "broker": "launch.up.roles:broker",
    "learner": "launch.up.roles:learner",
    "rollout": "launch.up.roles:rollout",
    "sft": "launch.up.roles:sft",
    "plan": "launch.plan.plan:command",
    "eval": "launch.up.roles:evaluate",
    "doctor": "launch.doctor.doctor:command",
    "selftest": "launch.selftest.selftest:command",
    "preflight": "launch.cluster.preflight.preflight:command",
    "status": "launch.observe.status:command",
    "top": "launch.observe.status:top",
    "sinks": "launch.sinks.process:command",
    "report": "launch.results.report:command",
    "ledger": "launch.observe.ledger:command",
    "web": "launch.web.web:command",
    "logs": "launch.observe.logs:command",
    "transcripts": "launch.observe.transcripts:command",
    "stop": "launch.up.stop:command",
    "resume": "launch.up.resume:command",
    "export": "launch.results.export:command",
    "replay": "launch.results.replay:command",
    "trace": "launch.results.trace:command",
    "keys": "launch.keys:command",
    "slurm": "launch.cluster.slurm.submit:command",
    "scale": "launch.cluster.slurm.scale:command",
}
# packages that not every role has, and the environments of launch/setup.sh that have them
PACKAGES = {
    **{"torch": "cpu|learner|rollout", "megatron": "cpu|learner", "vllm": "cpu|rollout"},
    **dict.fromkeys(("transformers", "starlette", "uvicorn"), "cpu"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `slipstream`; returns the exit code."""
    join_supervisor()
    args = parse(argv)
    module, _, function = HANDLERS[args.command].partition(":")
    try:
        return getattr(importlib.import_module(module), function)(args)
    except SlipstreamError as error:
        why, code = str(error), error.exit_code
    except KeyboardInterrupt:
        why, code = "interrupted", EXIT_FAILED
    except BrokenPipeError:  # `slipstream ledger RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        roles = PACKAGES.get((error.name or "").partition(".")[0])
        if roles is None:
            raise
        why, code = f"the package '{error.name}' is not installed here; run launch/setup.sh {roles}", EXIT_USAGE
    print(f"slipstream {args.command}: {why}", file=sys.stderr)
    return code


def run() -> NoReturn:
    """The console script: `main`, then a prompt end of the process."""
    leave(main())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; overrides may stand before and after options. Exits with code 2 on bad usage."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "logs" and args.role is None and len(rest) == 1 and not rest[0].startswith("-"):
        args.role = rest.pop()  # it stood after an option
    if rest:
        if not hasattr(args, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        args.overrides = [*args.overrides, *rest]
    first = args.config if args.command in ("learner", "rollout") else None
    if first and "=" in first and not os.path.exists(first):
        args.config, args.overrides = None, [first, *args.overrides]
    return args


def build_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    looks = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="slipstream", description=DESCRIPTION, formatter_class=looks)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_job_commands(commands)
    _add_observing_commands(commands)
    _add_slurm_commands(commands)
    keys = _command(commands, "keys", "CURVE keys for broker.credentials; only ever adds to an existing folder")
    keys.epilog = "docs/security.md says which file belongs where."
    keys.add_argument("dir", metavar="DIR", help="the key folder, made when it is missing")
    keys.add_argument("--nodes", type=int, default=0, metavar="N", help="credentials node-0 ... node-(N-1)")
    keys.add_argument("--node", action="append", default=[], metavar="NAME", help="a node's credential; repeatable")
    keys.add_argument("--revoke", action="append", default=[], metavar="NAME", help="take a node's credential back")
    return parser


Commands = argparse._SubParsersAction  # type of add_subparsers(), which has no public name
RUN_OR_CONFIG = "a run's folder, or a config file"
SHARED: dict[str, dict[str, Any]] = {  # arguments of several commands
    "config": {"metavar": "CONFIG", "help": "YAML file"},
    "run": {"metavar": "RUN", "help": "a run's folder, or the config file that names it"},
    "--credentials": {"metavar": "PATH", "help": "key folder or credential file (broker.credentials)"},
    "overrides": {"metavar": "key=value", "nargs": "*", "default": (), "help": "override one key"},
    "--join": {"metavar": "ADDRESS", "help": "a running job's broker: tcp://HOST:PORT, or several with commas"},
    "--join-timeout-s": {"metavar": "S", "type": float, "default": 30.0, "help": "seconds to wait for the broker (30)"},
    "--json": {"action": "store_true", "help": "machine-readable"},
    "--plain": {"action": "store_true", "help": "one line now and then instead of the live view"},
}


def _command(commands: Commands, name: str, text: str, *shared: str, **config: str) -> argparse.ArgumentParser:
    """A command with these arguments of SHARED; `config` changes the looks of its first one."""
    parser = commands.add_parser(name, help=text, description=text)
    for argument in shared:
        parser.add_argument(argument, **SHARED[argument] | (config if argument in ("config", "run") else {}))
    return parser


def _add_job_commands(commands: Commands) -> None:
    job = ("config", "overrides")
    text = "broker, learner and nodes on this machine, one live view, one clean stop"
    up = _command(commands, "up", text, *job, "--plain")
    text = "every role may use every GPU, for example the only one; engines then need rollout.engine.kv_cache_mib"
    up.add_argument("--share-gpus", action="store_true", help=text)
    up.add_argument("--web", action="store_true", help="also serve the page of `slipstream web` on this machine")
    _command(commands, "broker", "the broker of a job; with broker.store redis it may stand by", *job)
    text = "the learner of a job, or one of its machines (starts its ranks under torchrun)"
    joining = (*job, "--credentials", "--join", "--join-timeout-s")
    _command(commands, "learner", text, *joining, nargs="?")
    rollout = _command(commands, "rollout", "one rollout node", *joining, nargs="?")
    rollout.add_argument("--node-id", metavar="ID", help="name of this node, unique in the job (default: host-pid)")
    rollout.add_argument("--pool", choices=("eval",), help="take held-out problems only (docs/evaluation.md)")
    _command(commands, "sft", "supervised warm start on the Megatron learner; the result is RUN/model", *job)
    text = "layout, memory per GPU, batches, window and all checks; needs no GPU"
    plan = _command(commands, "plan", text, *job, "--json")
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="ranks of one machine (8)")
    plan.add_argument("--link", type=float, default=100.0, metavar="GBIT", help="Gb/s of a machine's link (100)")
    text = "what this machine can run, what is missing for a config, and why a job stands still"
    doctor = _command(commands, "doctor", text, *job, "--json", metavar="CONFIG|RUN", nargs="?", help=RUN_OR_CONFIG)
    roles, text = ("cpu", "learner", "rollout", "base"), "whose packages (default: by what is here)"
    doctor.add_argument("--role", choices=roles, help=text)
    text = "networks, versions, clocks and disks of a job's machines, before it starts; run it on each of them"
    preflight = _command(commands, "preflight", text, *job, "--json")
    preflight.add_argument("--meet", metavar="tcp://HOST:PORT", help="meeting place (default: broker.address)")
    preflight.add_argument("--machines", type=int, metavar="N", help="how many (default: Slurm's, or learner.machines)")
    preflight.add_argument("--wait-s", metavar="S", type=float, default=60.0, help="wait so long for all of them (60)")
    roles = ("learner", "rollout", "broker")
    preflight.add_argument("--role", choices=roles, default="learner", help="what runs on this machine (learner)")
    text = "prove learner, weights and engine on this machine's devices, with the repository's tests"
    selftest = _command(commands, "selftest", text, "--json")
    selftest.add_argument("--only", action="append", metavar="ITEM", help="this item; repeatable")
    text = "end after M (10); a CPU gets ten times that"
    selftest.add_argument("--minutes", type=float, default=10.0, metavar="M", help=text)
    text = "accuracy of a model on evaluation.datasets, greedy and sampled"
    evaluate = _command(commands, "eval", text, *job, "--json", metavar="RUN|CONFIG", help=RUN_OR_CONFIG)
    evaluate.add_argument("--model", metavar="DIR", help="Hugging Face folder (default: RUN/model)")


def _add_slurm_commands(commands: Commands) -> None:
    text = "broker, learner and fleet as jobs of Slurm"
    slurm = _command(commands, "slurm", text, "config", "overrides", metavar="CONFIG|RUN", help=RUN_OR_CONFIG)
    slurm.add_argument("--dry-run", action="store_true", help="write and print the scripts, submit nothing")
    slurm.add_argument("--cancel", action="store_true", help="drain the run's jobs and end them")
    text = "an option of sbatch for broker, learner or fleet, or for all; empty to leave it out; repeatable"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="[ROLE:]OPTION[=VALUE]", help=text)
    scale = _command(commands, "scale", "more or fewer nodes for a run on Slurm", "run")
    how = scale.add_mutually_exclusive_group(required=True)
    how.add_argument("--rollouts", type=int, metavar="N", help="so many nodes; the newest ones leave first")
    how.add_argument("--follow-advice", metavar="MIN..MAX", help="as the advisor of `status` says, until the run ends")


def _add_observing_commands(commands: Commands) -> None:
    job, place = ("run", "--credentials"), {"metavar": "RUN|ADDRESS", "help": "a run's folder, or its broker's address"}
    text = "who is alive, on which version, waiting on what and since when"
    _command(commands, "status", text, *job, "--json", **place)
    _command(commands, "top", "the live view of a running job", *job, "--plain", **place)
    logs = _command(commands, "logs", "the end of a role's log, also from another machine", *job, **place)
    logs.add_argument("role", metavar="ROLE", nargs="?", help="broker, learner, learner-RANK or a node id")
    logs.add_argument("--lines", type=int, default=50, metavar="N", help="the last N (50), at most 64 KiB")
    text = "episodes that were trained on or failed, token by token; without --step and --task the newest ones"
    transcripts = _command(commands, "transcripts", text, "run", "--json")
    transcripts.add_argument("--step", type=int, metavar="N", help="those that step N trained on")
    transcripts.add_argument("--task", type=int, metavar="S", help="those of the task with serial S")
    transcripts.add_argument("--worst", action="store_true", help="only the worst of each step, and failed ones")
    text = "background of the policy's tokens (version)"
    transcripts.add_argument("--color", choices=("version", "ratio"), default="version", help=text)
    stop = _command(commands, "stop", "every role leaves; the same commands continue the job", *job, **place)
    stop.add_argument("--timeout-s", type=float, default=600.0, metavar="S", help="how long to wait for them (600)")
    sinks = _command(commands, "sinks", "feed telemetry.sinks from the run's files, until the run has ended", "run")
    sinks.add_argument("--sink", action="append", metavar="NAME", help="instead of telemetry.sinks; repeatable")
    text = "a job that a watch rule paused or stopped may continue"
    _command(commands, "resume", text, "run")
    report = _command(commands, "report", "summary table, plots and a page of a run, or of several side by side")
    report.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or the config file that names it")
    report.add_argument("--out", metavar="DIR", help="folder for them (default: RUN/report; of several runs ./report)")
    _command(commands, "ledger", "what became of every task, also after the job ended", *job, "--json", **place)
    web = _command(commands, "web", "a page in the browser that shows runs live; it changes nothing")
    web.add_argument("runs", metavar="RUN", nargs="+", help=SHARED["run"]["help"])
    web.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a token")
    web.add_argument("--port", type=int, default=8642, metavar="P", help="port (8642); 0 takes any")
    web.add_argument("--token-file", metavar="F", help="file with the token that every request then needs")
    export = _command(commands, "export", "a Hugging Face folder of the final model or of a checkpoint", "run")
    export.add_argument("dir", metavar="DIR", help="new folder for the model")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N")
    which.add_argument("--best", action="store_true", help="the checkpoint that learner.checkpoint.keep_best keeps")
    text = "train recorded steps of a run again, offline, and compare"
    replay = _command(commands, "replay", text, "run", "overrides")
    replay.add_argument("--from", dest="first", type=int, default=0, metavar="STEP", help="from its checkpoint (0)")
    replay.add_argument("--to", dest="last", type=int, metavar="STEP", help="last step (default: the last recorded)")
    replay.add_argument("--out", metavar="DIR", help="new run folder (default: RUN/replays/N)")
    trace = _command(commands, "trace", "the timeline of all processes as a file for ui.perfetto.dev", "run")
    trace.add_argument("--from", dest="first", type=int, metavar="STEP", help="first step (default: all)")
    trace.add_argument("--to", dest="last", type=int, metavar="STEP", help="last step (default: all)")
    trace.add_argument("--out", metavar="FILE", help="the file (default: RUN/trace.json)")


if __name__ == "__main__":
    run()
