"""slipstream up CONFIG: all roles of a job on this machine, from the first start to the last end.

It starts the broker, then the learner (torchrun) and the nodes, each in a process group of its own.
A job is done when the learner ends. The nodes leave by themselves, and the broker writes the ledger and ends.
With --web the page of a job that is done stays until Ctrl-C.
On Ctrl-C nodes return their leases, the learner writes a checkpoint, and the broker writes the ledger and ends.
On a failure the same happens, after a message with the role that failed, its exit and its log.
"""

import argparse
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from common.config.checks import C
from common.config.loading import load_config
from common.config.schema import Config
from common.errors import EXIT_DONE, ConfigError, SlipstreamError, UsageError
from common.json_lines import EventFile
from common.process.install import need_packages
from common.process.lifecycle import DrainFlag
from common.process.lock_file import only_one
from common.process.logs import log_path
from common.process.run_dir import RunDir, running_broker
from common.run_reader import RecentTail, read_recent
from launch.certificates import first_line
from launch.observe.job_view import Display, open_display, say, unheard
from launch.observe.observation import observe, outcome_of
from launch.resolve_target import Target, checked, need_broker_library, warn_of_unused
from launch.sinks.process import TOLD_S, check_packages
from launch.up.devices import (
    VISIBLE,
    Place,
    assign,
    available_cores,
    plan_cores,
    port_problems,
    rounding_problems,
    table,
)
from launch.up.ranks import thread_environment
from launch.up.roles import role_command
from launch.up.supervisor import DRAIN_S, Role, RoleSpec, Supervisor, describe_exit, end_error
from learner.loop.run_files import read_record

USED = "runs this job with `slipstream up`; `slipstream top` shows it, `slipstream stop` ends it"
BROKER_START_S = 30.0
NODES_LEAVE_S = 30.0  # after the job is done, before they are told to
NODES_WITHOUT_BROKER_S = 3.0  # after the job is done nodes have nothing to save
BROKER_END_S = 30.0
BESIDE = ("sinks", "web")  # the job continues without them
BESIDE_LEAVE_S = 5.0  # besides the time that sinks take for the last lines
POLL_S = 0.1
ANSWER_S = 1.0


def command(args: argparse.Namespace) -> int:
    """Run the job to its end, or until it is told to stop; the same command continues a stopped one."""
    config, run = ready(load_config(Path(args.config), args.overrides), args.config)
    said, found = first_line(config, args.config)
    with ExitStack() as lock:
        lock.enter_context(only_one(run.up_lock, USED))
        if done := finished(run, config):
            say(done)
            return EXIT_DONE
        say(said)
        warn_of_unused(config)
        if (address := running_broker(run)) is not None:
            raise UsageError(f"{run.path}: a broker already runs at {address}; stop that job first")
        places = assign(config, share=args.share_gpus)
        if not places:  # all roles run with this interpreter
            need_packages("learner", *["rollout"] * bool(config.rollout.nodes))
        run.prepare(config)
        run.check_checkpoints(config, run.identify())
        found.keep(run)
        for stale in (run.broker_json, run.status_json, run.recovering):
            stale.unlink(missing_ok=True)
        if places:
            say("\n".join(["GPUs of each role:", *table(places)]))
        job = Job(config, run, places, args.web)
        return job.run(args.plain, None if args.no_stay else lock.close)


def ready(config: C, file: str) -> tuple[C, RunDir]:
    """The config of a run of this machine with absolute paths, after all checks, and its folder, which is not made yet.

    Errors name `file`. Raises UsageError.
    """
    config, run = checked(config, file)
    if config.learner.machines > 1:
        hint = "it would start one machine; docs/machines.md says how to start a learner of several"
        raise ConfigError(file, "learner.machines", "1", str(config.learner.machines), hint)
    for wrong in (*port_problems(config), *rounding_problems(config)):
        raise ConfigError.of(file, wrong)
    run.check_spares(file)
    run.check_agrees(config)
    if config.rl is not None:
        need_broker_library(config.rl)
        check_packages(config.telemetry.sinks)
    return config, run


def finished(run: RunDir, config: Config) -> str:
    """Says what a run that has done all its steps has reached, and the next command; '' while it has not."""
    reached = outcome_of(run, config, read_recent(run.metrics))
    return f"{run.path} is {reached.sentence()}\n{next_command(run)}" if reached.finished else ""


def next_command(run: RunDir) -> str:
    return f"next: `slipstream web {run.path}` shows the run in a browser"


def role_specs(config: Config, run: RunDir, places: Mapping[str, Place], web: bool = False) -> list[RoleSpec]:
    """How to run broker, learner, nodes, sinks and page, in this order, each in its place; the page on a free port."""
    nodes = [f"node-{i}" for i in range(config.rollout.nodes)]
    threads = config.rollout.threads
    restarts = config.run.max_restarts
    learner_threads = config.learner.world_size * config.learner.threads
    on_gpus = any(VISIBLE in place.env for place in places.values())
    cores = [] if on_gpus else available_cores()  # CUDA, NCCL and vLLM's processes have threads of their own
    learner_cores, *node_cores = plan_cores(cores, learner_threads, [threads] * len(nodes))

    def spec(name: str, words: list[str], log_id: str = "0", **options: Any) -> RoleSpec:
        place = places.get(name, Place())
        command = role_command([words[0], str(run.config), *words[1:]], place.python)
        options = {"max_restarts": restarts, **options, "env": {**place.env, **options.get("env", {})}}
        return RoleSpec(name, command, log_path(run.logs, words[0], log_id), **options)

    keeps = config.broker.durability != "memory"  # others lose everything with their process
    env = thread_environment(threads)
    specs = [spec("broker", ["broker"], max_restarts=restarts if keeps else 0)]
    specs.append(spec("learner", ["learner"], cores=learner_cores))
    for name, own in zip(nodes, node_cores, strict=True):
        specs.append(spec(name, ["rollout", "--node-id", name], name, child_cores=own, env=env))
    beside = [["sinks", str(run.path)]] if config.telemetry.sinks else []
    if web:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            beside.append(["web", str(run.path), "--port", str(probe.getsockname()[1])])
    for words in beside:
        specs.append(RoleSpec(words[0], role_command(words), log_path(run.logs, words[0], "0"), max_restarts=restarts))
    return specs


def page_address(web: RoleSpec) -> str:
    return f"http://127.0.0.1:{web.argv[-1]}/"


class Job:
    def __init__(self, config: Config, run: RunDir, places: Mapping[str, Place], web: bool = False) -> None:
        self.config = config
        self.run_dir = run
        self.tail = RecentTail(run.metrics)
        self.supervisor = Supervisor(self._on_event)
        self._specs = role_specs(config, run, places, web)
        self._nodes = [spec.name for spec in self._specs[2:] if spec.name not in BESIDE]
        self._display = Display(config, self.tail, None)
        self._started = time.monotonic()
        self._show_at = 0.0

    def run(self, plain: bool, before_stay: Callable[[], object] | None = None) -> int:
        """Start everything, watch it, stop everything; returns the exit code. Raises SlipstreamError.

        With `before_stay`, which is called first, the page of a job that is done stays until the next signal.
        """
        flag = DrainFlag.install(on_second=self.supervisor.kill_all)
        try:
            with open_display(self.config, self.tail, plain) as self._display:
                with unheard():
                    self._display.note(f"run folder {self.run_dir.path}, logs in {self.run_dir.logs}")
                done = False
                try:
                    self._start(flag)
                    done = self._watch(flag)
                except SlipstreamError as failure:  # said before the others are stopped, which may take a while
                    self._note(f"{str(failure).splitlines()[0].removesuffix(':')}; stopping the job")
                    raise
                finally:
                    stays = done and before_stay is not None and self._page_runs and not flag.is_set
                    self._stop(done, [name for name in BESIDE if name != "web" or not stays])
            say(self._summary(done))
            if stays and before_stay is not None:
                before_stay()
                self._stay(flag)
            return EXIT_DONE
        finally:
            self.supervisor.kill_all()

    def _start(self, flag: DrainFlag) -> None:
        """The others start when the broker has written its address, unless the job is told to stop before.

        The broker has little time for that, but as long as it likes to read the run's store.
        """
        broker, *others = self._specs
        self.supervisor.start(broker)
        deadline = time.monotonic() + BROKER_START_S
        while running_broker(self.run_dir) is None:
            for role in self.supervisor.poll():
                self._check_end(role)
            if time.monotonic() > deadline:
                if not self.run_dir.recovering.exists():
                    raise SlipstreamError(f"the broker did not come up within {BROKER_START_S:g} s; log: {broker.log}")
                self._note(f"waiting for the broker, which still reads the run's store; log: {broker.log}")
                deadline = time.monotonic() + BROKER_START_S
            if flag.wait(POLL_S):
                return
        for spec in others:
            self.supervisor.start(spec)
            if spec.name == "web":
                self._note(f"the page is at {page_address(spec)}")

    def _watch(self, flag: DrainFlag) -> bool:
        """Until the learner is done (True) or the job is to stop (False); raises SlipstreamError."""
        while not flag.wait(POLL_S):
            for role in self.supervisor.poll():
                if role.spec.name not in ("learner", "broker") or role.exit_code != 0:
                    self._check_end(role)
                    continue
                record = read_record(self.run_dir)
                done = role.spec.name == "learner" and record is not None and record.state == "done"
                if not done:
                    self._note(f"the {role.spec.name} was told to stop; stopping the job")
                return done
            self._show()
        self._note(f"{flag.reason}: stopping; one more Ctrl-C or SIGTERM kills everything at once")
        return False

    def _check_end(self, role: Role) -> None:
        """Raise SlipstreamError when the job cannot continue without a role that is not coming back."""
        name = role.spec.name
        nodes = [self.supervisor.roles[node] for node in self._nodes if node in self.supervisor.roles]
        if name in BESIDE:
            self._note(f"{name}: {describe_exit(role.exit_code)}; the job continues without it, log {role.spec.log}")
        elif name in self._nodes and role.exit_code == 0:
            self._note(f"{name} was told to leave")
        elif name in self._nodes and any(node.running or node.restart_at is not None for node in nodes):
            self._note(f"{name} failed for good ({describe_exit(role.exit_code)}); the job continues without it")
        else:
            raise end_error(role)

    def _show(self) -> None:
        if time.monotonic() < self._show_at:
            return
        seen = None
        with suppress(SlipstreamError):  # a view that lacks something must not end the job
            self.tail.update()
        with suppress(SlipstreamError):
            seen = observe(Target(self.run_dir, self.config.broker.credentials), ANSWER_S)
        with unheard():
            self._display.show(seen)
        self._show_at = time.monotonic() + self._display.every_s

    @property
    def _page_runs(self) -> bool:
        return "web" in self.supervisor.roles and self.supervisor.roles["web"].running

    def _stay(self, flag: DrainFlag) -> None:
        say(f"the page stays at {page_address(self.supervisor.roles['web'].spec)} until Ctrl-C")
        while self._page_runs and not flag.wait(POLL_S):
            self.supervisor.poll()
        self.supervisor.stop(["web"], BESIDE_LEAVE_S)

    def _stop(self, done: bool, beside: Sequence[str]) -> None:
        """Learner and nodes together, then the broker, then those `beside`; what does not end in time is killed."""
        told = not done or self._await_nodes()
        self.supervisor.stop([*self._nodes, "learner"], DRAIN_S if told else NODES_WITHOUT_BROKER_S)
        self._show_at = 0.0
        self._show()  # the last look while the broker still answers
        self.supervisor.stop(["broker"], BROKER_END_S)
        self.supervisor.stop(beside, TOLD_S + BESIDE_LEAVE_S)

    def _await_nodes(self) -> bool:
        """Wait until the broker has told the nodes that the job is done; False when it is gone for good.

        If it dies before they have left, it is started again.
        """
        self.supervisor.restarts = ("broker",)
        broker = self.supervisor.roles["broker"]
        deadline = time.monotonic() + NODES_LEAVE_S
        while time.monotonic() < deadline and any(self.supervisor.roles[name].running for name in self._nodes):
            self.supervisor.poll()
            if not broker.running and broker.restart_at is None:
                return False
            self._show()
            time.sleep(POLL_S)
        return True

    def _summary(self, done: bool) -> str:
        reached = outcome_of(self.run_dir, self.config, self.tail)
        steps = reached.of if done else reached.steps
        took = time.monotonic() - self._started
        head = "done" if done else "stopped; the same command continues from the last checkpoint"
        text = f"{head}: {steps} of {reached.of} steps, {took:.0f} s{reached.words()}"
        return f"{text}\n{next_command(self.run_dir)}"

    def _on_event(self, kind: str, detail: Mapping[str, object]) -> None:
        """Into RUN/events.jsonl, and to the person when it is no routine."""
        try:
            with closing(EventFile(self.run_dir.events, "supervisor")) as events:
                events.add(f"role_{kind}", **detail)
        except OSError as error:  # a full disk must not end the one who restarts the others
            self._note(f"events.jsonl cannot be written: {error.strerror}")
        name = str(detail["role"])
        if kind == "crashed":
            role = self.supervisor.roles[name]
            how = f"{describe_exit(role.exit_code)}; restarting in {detail['restart_in_s']} s"
            self._note(f"{name}: {how}, log {role.spec.log}")
        elif kind in ("restarted", "killed"):
            self._note(f"{name}: {kind}")

    def _note(self, text: str) -> None:
        with unheard():
            self._display.note(f"{time.strftime('%H:%M:%S')} {text}")
