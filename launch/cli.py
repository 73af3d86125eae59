"""The `slipstream` command: what it accepts, and which module does it. Commands are imported when they are used.

Exit code 0 is success, 1 a failure at run time, and 2 a bad config or bad usage, with the reason on stderr.
Exit code 3 is a failure that a restart of the same role would meet again.
"""

import argparse
import errno
import importlib
import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from common.errors import EXIT_FAILED, EXIT_USAGE, MOST_SHOWN, SlipstreamError, meant
from common.process.lifecycle import join_supervisor, leave
from common.process.logs import visible

DESCRIPTION = """Asynchronous GRPO: a Megatron learner, an elastic fleet of vLLM nodes and a broker between them.

CONFIG is a YAML file; key.path=value words after it override single keys, for example
  slipstream up configs/quickstart.yaml run.seed=2 staleness.max=0
RUN is the folder of a run (run.dir), or the config file that names it. ADDRESS is its broker's, tcp://HOST:PORT.
In the repository docs/README.md lists the pages, docs/config.md every key."""

COMMANDS = {  # by name: handler in launch/, arguments of SHARED, and the text of --help
    "init": ("quickstart.init:command", "", "a folder with a small job of one's own: data, rewards, config and model"),
    "up": ("up.up:command", "CONFIG key=value --plain",
        "broker, learner and nodes on this machine, one live view, one clean stop"),
    "broker": ("up.roles:broker", "CONFIG key=value", "the broker of a job; with broker.store redis it may stand by"),
    "learner": ("up.roles:learner", "[CONFIG] key=value --credentials --join --join-timeout-s",
        "the learner of a job, or one of its machines (starts its ranks under torchrun)"),
    "rollout": ("up.roles:rollout", "[CONFIG] key=value --credentials --join --join-timeout-s", "one rollout node"),
    "scorer": ("up.roles:scorer", "CONFIG --credentials --join",
        "vLLM with the model of one of the config's `scorers`, on this machine"),
    "sft": ("up.roles:sft", "CONFIG key=value --credentials --join --join-timeout-s",
        "supervised warm start on the Megatron learner; the result is RUN/model"),
    "sweep": ("sweep.sweep:command", "[CONFIG] key=value --plain --json",
        "runs with different values of keys, one after another, side by side, and the best"),
    "plan": ("checks.plan:command", "CONFIG key=value --json",
        "layout, memory per GPU, batches, window and all checks; needs no GPU"),
    "doctor": ("checks.doctor:command", "[CONFIG|RUN] key=value --json",
        "what this machine can run, what is missing for a config, and why a job stands still"),
    "certify": ("certify:command", "CONFIG key=value",
        "prove layout, adapters, critic, loss and precision of a job in miniature, against Hugging Face and one rank"),
    "selftest": ("checks.selftest:command", "--json",
        "prove learner, weights and engine on this machine's devices, with the repository's tests"),
    "preflight": ("checks.preflight.preflight:command", "CONFIG key=value --json",
        "networks, versions, clocks and disks of a job's machines, before it starts; run it on each of them"),
    "eval": ("up.roles:evaluate", "RUN|CONFIG key=value --json",
        "accuracy of a model on evaluation.datasets, greedy and sampled"),
    "status": ("observe.status:command", "RUN|ADDRESS --credentials --json",
        "who is alive, on which version, waiting on what and since when"),
    "top": ("observe.status:top", "RUN|ADDRESS --credentials --plain", "the live view of a running job"),
    "logs": ("observe.logs:command", "RUN|ADDRESS --credentials", "the end of a role's log, also from another machine"),
    "transcripts": ("observe.transcripts:command", "RUN --json",
        "episodes that were trained on or failed, token by token; without --step and --task the newest ones"),
    "stop": ("up.stop:command", "RUN|ADDRESS --credentials", "every role leaves; the same commands continue the job"),
    "set": ("up.change:command", "RUN|ADDRESS key=value --credentials",
        "other weights of tasks.sources, while the job runs"),
    "sinks": ("sinks.process:command", "RUN", "feed telemetry.sinks from the run's files, until the run has ended"),
    "resume": ("up.stop:resume", "RUN", "a job that a watch rule paused or stopped may continue"),
    "report": ("results.report:command", "RUN...",
        "one page on a run: verdict, curve, waste, what to change; or several side by side"),
    "ledger": ("observe.ledger:command", "RUN|ADDRESS --credentials --json",
        "what became of every task, also after the job ended"),
    "web": ("web.app:command", "RUN...", "a page in the browser that shows runs live; it changes nothing"),
    "export": ("results.export:command", "RUN", "a Hugging Face folder of the final model or of a checkpoint"),
    "convert": ("convert:command", "", "a model of which each rank reads only its part, under any layout"),
    "replay": ("results.replay:command", "RUN key=value", "train recorded steps of a run again, offline, and compare"),
    "trace": ("results.trace:command", "RUN", "the timeline of all processes as a file for ui.perfetto.dev"),
    "slurm": ("cluster.slurm.submit:command", "CONFIG|RUN key=value", "broker, learner and fleet as jobs of Slurm"),
    "scale": ("cluster.slurm.submit:scale_command", "RUN", "more or fewer nodes for a run on Slurm"),
    "keys": ("keys:command", "", "CURVE keys for broker.credentials; only ever adds to an existing folder"),
}  # fmt: skip
GROUPS = {  # by the order of --help
    "train": "init convert up sft sweep eval replay export resume set stop",
    "look": "status top web logs transcripts report ledger trace sinks",
    "check": "plan doctor certify selftest preflight",
    "launch": "broker learner rollout scorer slurm scale keys",
}
WORKS = ("certify", "up", "sweep")  # as with roles, 0 says that the work was done, not that its words were read
BAD_PATHS = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)  # a person named them
RUN = "a run's folder, or the config file that names it"
EITHER = "a run's folder, or a config file"


def duration(word: str) -> float:
    """The type of an option: at least 0 and at most a billion, which excludes nan."""
    if not 0 <= float(word) <= 1e9:
        raise ValueError(word)
    return float(word)


SHARED: dict[str, dict[str, Any]] = {  # arguments of several commands
    "CONFIG": {"dest": "config", "metavar": "CONFIG", "help": "YAML file"},
    "[CONFIG]": {"dest": "config", "metavar": "CONFIG", "nargs": "?", "help": "YAML file"},
    "CONFIG|RUN": {"dest": "config", "metavar": "CONFIG|RUN", "help": EITHER},
    "[CONFIG|RUN]": {"dest": "config", "metavar": "CONFIG|RUN", "nargs": "?", "help": EITHER},
    "RUN|CONFIG": {"dest": "config", "metavar": "RUN|CONFIG", "help": EITHER},
    "RUN": {"dest": "run", "metavar": "RUN", "help": RUN},
    "RUN...": {"dest": "runs", "metavar": "RUN", "nargs": "+", "help": RUN},
    "RUN|ADDRESS": {"dest": "run", "metavar": "RUN|ADDRESS", "help": "a run's folder, or its broker's address"},
    "key=value": {"dest": "overrides", "metavar": "key=value", "nargs": "*", "default": (), "help": "override one key"},
    "--credentials": {"metavar": "PATH", "help": "key folder or credential file (broker.credentials)"},
    "--join": {"metavar": "ADDRESS", "help": "a running job's broker: tcp://HOST:PORT, or several with commas"},
    "--join-timeout-s": {"metavar": "S", "type": duration, "default": 30.0, "help": "wait so long for the broker (30)"},
    "--json": {"action": "store_true", "help": "machine-readable"},
    "--plain": {"action": "store_true", "help": "one line now and then instead of the live view"},
}
# commands that need more than the base install, and the extras that have their packages
EXTRAS = {
    **dict.fromkeys(["learner", "sft", "certify", "convert", "export", "replay"], "learner"),
    **dict.fromkeys(["rollout", "scorer", "eval"], "rollout"),
    **dict.fromkeys(["init", "up", "sweep"], "cpu"),
    **{"web": "web", "report": "report", "sinks": "sinks"},
}
# modules that the extras bring; another one that is missing may be a plugin's of the user
BROUGHT = (
    "torch megatron transformers tokenizers safetensors huggingface_hub pyarrow blake3 cryptography einops omegaconf "
    "vllm aiohttp math_verify jsonschema gymnasium matplotlib redis starlette uvicorn tensorboard wandb mlflow "
    "sqlalchemy alembic trackio"
)


def main(argv: Sequence[str] | None = None) -> int:
    join_supervisor()
    args = parse(argv)
    if args.command is None or args.version:
        return overview(args.version)
    module, _, function = COMMANDS[args.command][0].partition(":")
    try:
        return getattr(importlib.import_module(f"launch.{module}"), function)(args)
    except SlipstreamError as error:
        return refuse(args.command, str(error), error.exit_code)
    except KeyboardInterrupt:
        return refuse(args.command, "interrupted", EXIT_FAILED)
    except BrokenPipeError:  # `slipstream ledger RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED if args.command in WORKS or module == "up.roles" else 0
    except OSError as error:
        of_role = module == "up.roles"  # its log has the traceback
        if of_role or error.filename is None or error.errno not in BAD_PATHS:
            raise
        return refuse(args.command, f"{str(error.filename)[:MOST_SHOWN]}: {error.strerror}", EXIT_USAGE)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if args.command not in EXTRAS or package not in BROUGHT.split():
            raise
        from common.process.install import advice

        why = f"the package '{package}' is not installed here; {advice(EXTRAS[args.command])}"
        return refuse(args.command, why, EXIT_USAGE)


def refuse(command: str, why: str, code: int) -> int:
    with suppress(OSError):  # a closed one, or a full disk
        print(f"slipstream {command}: {visible(why)}", file=sys.stderr)
    return code


def overview(version: bool) -> int:
    """`slipstream` alone: the help, or the version."""
    if not version:
        build_parser().print_help()
        return 0
    from common.process.versions import versions

    print(f"slipstream {versions()['slipstream'] or 'that is not installed'}")
    return 0


def run() -> NoReturn:
    """The console script: `main`, then a prompt end of the process."""
    from common.process.install import CHECKOUT

    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if CHECKOUT is not None and str(CHECKOUT) not in paths:  # children do not search the current folder for it
        os.environ["PYTHONPATH"] = os.pathsep.join([str(CHECKOUT), *filter(None, paths)])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # it is closed: the next file, here or in a child, would take its number
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?'
    leave(main())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; overrides may stand before and after options. Exits with code 2 on bad usage."""
    words = sys.argv[1:] if argv is None else [*argv]
    parser = build_parser()
    for word in words:
        if re.search("[\\ud800-\\udfff]", word):  # as Python has bytes that are no UTF-8
            parser.error(f"expected words of UTF-8, found {word!r}")
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        parser.error(f"unknown command '{words[0]}'; {meant(words[0], COMMANDS, '`slipstream --help` lists them')}")
    args, rest = parser.parse_known_args(words)
    if args.command == "logs" and args.role is None and len(rest) == 1 and not rest[0].startswith("-"):
        args.role = rest.pop()  # it stood after an option
    if rest:
        if not hasattr(args, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
            options = re.findall(r"--[a-z-]+", args.parser.format_usage())
            hint = meant(rest[0], options, f"`{args.parser.prog} --help` lists what it takes")
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}; {hint}")
        args.overrides = [*args.overrides, *rest]
    first = args.config if args.command in ("learner", "rollout") else None
    if first and "=" in first and not os.path.exists(first):
        args.config = None
        args.overrides = [first, *args.overrides]
    return args


def build_parser() -> argparse.ArgumentParser:
    looks = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="slipstream", description=DESCRIPTION, epilog=commands_by_group(), formatter_class=looks
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    text = "one of those below; `slipstream COMMAND --help` says more"
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=text)
    made = {name: commands.add_parser(name, description=text) for name, (_, _, text) in COMMANDS.items()}
    for name, (_, shared, _) in COMMANDS.items():
        made[name].set_defaults(parser=made[name])
        for word in shared.split():
            made[name].add_argument(*[word] * word.startswith("--"), **SHARED[word])
    _add_job_arguments(made)
    _add_observing_arguments(made)
    _add_slurm_arguments(made)
    _add_sweep_arguments(made["sweep"])
    made["init"].add_argument("dir", metavar="DIR", type=Path, help="a new or empty folder")
    convert = made["convert"]
    convert.epilog = "docs/models.md says which roles read DIR."
    convert.add_argument("model", metavar="MODEL", help="Hugging Face folder, or OWNER/NAME of the hub")
    convert.add_argument("dir", metavar="DIR", help="a new or empty folder")
    convert.add_argument("--no-verify", action="store_true", help="without the forward check of the translation")
    keys = made["keys"]
    keys.epilog = "docs/security.md says which file belongs where."
    keys.add_argument("dir", metavar="DIR", help="the key folder, made when it is missing")
    keys.add_argument("--nodes", type=int, default=0, metavar="N", help="credentials node-0 ... node-(N-1)")
    keys.add_argument("--node", action="append", default=[], metavar="NAME", help="a node's credential; repeatable")
    keys.add_argument("--revoke", action="append", default=[], metavar="NAME", help="take a node's credential back")
    return parser


def commands_by_group() -> str:
    width = max(40, shutil.get_terminal_size().columns - 2)
    indent = " " * 18
    lines: list[str] = []
    for group, names in GROUPS.items():
        lines += ["", f"{group}:"]
        for name in names.split():
            lines += textwrap.wrap(COMMANDS[name][2], width, initial_indent=f"  {name:16}", subsequent_indent=indent)
    return "\n".join(lines[1:])


def _add_job_arguments(made: Mapping[str, argparse.ArgumentParser]) -> None:
    up, selftest = made["up"], made["selftest"]
    text = "also serve the page of `slipstream web` on this machine; after the job it stays until Ctrl-C"
    up.add_argument("--web", action="store_true", help=text)
    up.add_argument("--no-stay", action="store_true", help="end with the job, the page too")
    text = "every role may use every GPU, for example the only one; engines then need rollout.engine.kv_cache_mib"
    for command in (up, made["sweep"]):
        command.add_argument("--share-gpus", action="store_true", help=text)
    scorer = made["scorer"]
    scorer.add_argument("name", metavar="NAME", help="its name in `scorers`")
    scorer.add_argument("overrides", metavar="key=value", nargs="*", default=(), help="override one key")
    rollout = made["rollout"]
    rollout.add_argument("--node-id", metavar="ID", help="name of this node, unique in the job (default: host-pid)")
    rollout.add_argument("--pool", choices=("eval",), help="take held-out problems only (docs/evaluation.md)")
    plan = made["plan"]
    plan.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="ranks of one machine (8)")
    plan.add_argument("--link", type=float, default=100.0, metavar="GBIT", help="Gb/s of a machine's link (100)")
    certify = made["certify"]
    certify.epilog = "docs/certificates.md says what a certificate proves, and what not."
    text = "folder of the certificate (default: `certificates` beside CONFIG, where jobs look for it)"
    certify.add_argument("--out", metavar="DIR", help=text)
    roles = ("cpu", "learner", "rollout", "base")
    text = "whose packages (default: by what is here)"
    made["doctor"].add_argument("--role", choices=roles, help=text)
    preflight = made["preflight"]
    preflight.add_argument("--meet", metavar="tcp://HOST:PORT", help="meeting place (default: broker.address)")
    preflight.add_argument("--machines", type=int, metavar="N", help="how many (default: Slurm's, or learner.machines)")
    preflight.add_argument("--wait-s", metavar="S", type=float, default=60.0, help="wait so long for all of them (60)")
    roles = ("learner", "rollout", "broker")
    preflight.add_argument("--role", choices=roles, default="learner", help="what runs on this machine (learner)")
    selftest.add_argument("--only", action="append", metavar="ITEM", help="this item; repeatable")
    text = "end after M (10); a CPU gets ten times that"
    selftest.add_argument("--minutes", type=duration, default=10.0, metavar="M", help=text)
    made["eval"].add_argument("--model", metavar="DIR", help="Hugging Face folder (default: RUN/model)")


def _add_sweep_arguments(sweep: argparse.ArgumentParser) -> None:
    sweep.epilog = "A word key=a,b,c gives a key several values; docs/sweep.md has the rules."
    sweep.add_argument("--seeds", type=int, metavar="N", help="so many seeds of each combination, from run.seed on")
    sweep.add_argument("--dir", metavar="DIR", help="folder of the runs (default: run.dir with -sweep)")
    text = "how the best is chosen (default: the held-out evaluation, else reward or loss)"
    sweep.add_argument("--winner", metavar="METRIC[:max|min][:last N]", help=text)
    sweep.add_argument("--report", metavar="DIR", help="run nothing: the report and the winner of a sweep's folder")


def _add_slurm_arguments(made: Mapping[str, argparse.ArgumentParser]) -> None:
    slurm, scale = made["slurm"], made["scale"]
    made["sweep"].add_argument("--slurm", action="store_true", help="submit the runs to Slurm instead")
    slurm.add_argument("--cancel", action="store_true", help="drain the run's jobs and end them")
    texts = {
        "sbatch": ("OPTION[=VALUE]", "an option of sbatch for a role or all; empty to leave it out"),
        "setup": ("LINE", "a line of the shell that runs first in the job, such as `module load cuda`"),
        "container": ("IMAGE", "run in it: a .sif file or folder by Apptainer, another image by pyxis"),
    }
    for command in (slurm, made["sweep"]):
        for name, (word, text) in texts.items():
            text = f"{text}; repeatable; ROLE: broker, learner, fleet"
            command.add_argument(f"--{name}", action="append", default=[], metavar=f"[ROLE:]{word}", help=text)
        command.add_argument("--dry-run", action="store_true", help="write and print the scripts, submit nothing")
    how = scale.add_mutually_exclusive_group(required=True)
    how.add_argument("--rollouts", type=int, metavar="N", help="so many nodes; the newest ones leave first")
    how.add_argument("--follow-advice", metavar="MIN..MAX", help="as the advisor of `status` says, until the run ends")


def _add_observing_arguments(made: Mapping[str, argparse.ArgumentParser]) -> None:
    logs = made["logs"]
    logs.add_argument("role", metavar="ROLE", nargs="?", help="broker, learner, learner-RANK, a node id or scorer-NAME")
    logs.add_argument("--lines", type=int, default=50, metavar="N", help="the last N (50), at most 64 KiB")
    transcripts = made["transcripts"]
    transcripts.add_argument("--step", type=int, metavar="N", help="those that step N trained on")
    transcripts.add_argument("--task", type=int, metavar="S", help="those of the task with serial S")
    transcripts.add_argument("--worst", action="store_true", help="only the worst of each step, and failed ones")
    text = "background of the policy's tokens (version)"
    transcripts.add_argument("--color", choices=("version", "ratio"), default="version", help=text)
    made["stop"].add_argument(
        "--timeout-s", type=duration, default=600.0, metavar="S", help="how long to wait for them (600)"
    )
    made["sinks"].add_argument("--sink", action="append", metavar="NAME", help="instead of telemetry.sinks; repeatable")
    text = "folder for them (default: RUN/report; of several runs ./report)"
    made["report"].add_argument("--out", metavar="DIR", help=text)
    web = made["web"]
    web.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1); others need a token")
    web.add_argument("--port", type=int, metavar="P", help="port; 0 takes any (default: 8642, or any if it is taken)")
    web.add_argument("--token-file", metavar="F", help="file with the token that every request then needs")
    export = made["export"]
    export.add_argument("dir", metavar="DIR", help="new folder for the model")
    what = export.add_mutually_exclusive_group()
    what.add_argument("--adapter", action="store_true", help="the adapters of learner.lora alone; docs/lora.md")
    what.add_argument("--critic", action="store_true", help="the value model of learner.critic; docs/critic.md")
    text = "also put it on the hub; a repository that does not exist yet is made, private"
    export.add_argument("--upload", metavar="OWNER/NAME", help=text)
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N")
    which.add_argument("--best", action="store_true", help="the checkpoint that learner.checkpoint.keep_best keeps")
    replay = made["replay"]
    replay.add_argument("--from", dest="first", type=int, default=0, metavar="STEP", help="from its checkpoint (0)")
    replay.add_argument("--to", dest="last", type=int, metavar="STEP", help="last step (default: the last recorded)")
    replay.add_argument("--out", metavar="DIR", help="new run folder (default: RUN/replays/N)")
    trace = made["trace"]
    trace.add_argument("--from", dest="first", type=int, metavar="STEP", help="first step (default: all)")
    trace.add_argument("--to", dest="last", type=int, metavar="STEP", help="last step (default: all)")
    trace.add_argument("--out", metavar="FILE", help="the file (default: RUN/trace.json)")


if __name__ == "__main__":
    run()
