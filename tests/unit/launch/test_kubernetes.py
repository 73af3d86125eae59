"""Manifests of launch/cluster/kubernetes fit the API's schemas, each other, commands, config and image."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from common.config.checks import problems
from common.config.loading import load_config
from common.config.schema import Config
from common.security.credentials import load_allowed, load_credential, load_server
from launch.cli import main, parse
from launch.up.ranks import SHUTDOWN_TIMEOUT_S
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S, until

FOLDER = ROOT / "launch" / "cluster" / "kubernetes"
DOCKERFILE = FOLDER.with_name("Dockerfile")
VERSIONS = ("1.31", "1.34", "1.37")  # podFailurePolicy is stable since 1.31
WORKLOADS = {"broker": "StatefulSet", "learner": "Job", "fleet": "Deployment"}
MODEL = f"model.path={ROOT / 'configs' / 'models' / 'Qwen3-0.6B'}"


FILES = [*sorted(FOLDER.glob("base/[!k]*.yaml")), FOLDER / "job" / "autoscaler.yaml"]
ALL = [document for file in FILES for document in yaml.safe_load_all(file.read_text())]
JOB = yaml.safe_load((FOLDER / "job" / "kustomization.yaml").read_text())


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = (d for d in ALL if (d["kind"], d["metadata"]["name"]) == (kind, f"slipstream-{name}"))
    return found


def pod(role: str) -> dict[str, Any]:
    return one(WORKLOADS[role], role)["spec"]["template"]["spec"]


def container(role: str) -> dict[str, Any]:
    (found,) = pod(role)["containers"]
    return found


def config(*overrides: str) -> Config:
    return load_config(FOLDER / "job" / "job.yaml", overrides)


def generated(kind: str) -> dict[str, list[str]]:
    """Names of the job's config maps or secrets, each with its files."""
    return {made["name"]: made["files"] for made in JOB[kind]}


def names_in(found: Any, key: str) -> Iterator[Any]:
    """Every value of `key`, at any depth."""
    if isinstance(found, dict):
        yield from (value for name, value in found.items() if name == key)
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from names_in(inner, key)


# ---------------------------------------------------------------- the API and kustomize


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", ALL, ids=[f"{d['kind']}/{d['metadata']['name']}" for d in ALL])
def test_a_manifest_fits_the_schema_of_the_api(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_refuse_a_wrong_key() -> None:
    wrong = {**one("PodDisruptionBudget", "fleet"), "spec": {"maxUnavailabel": 1}}
    with pytest.raises(kubernetes_validate.ValidationError) as refused:
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)
    assert "maxUnavailabel" in str(refused.value)


def test_the_pages_pod_for_files_fits_the_schema_too() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (found,) = re.findall(r"<<'POD'\n(.*?)\n *POD\n", text, re.DOTALL)
    pod_for_files = yaml.safe_load(textwrap.dedent(found))
    kubernetes_validate.validate(pod_for_files, VERSIONS[-1], strict=True)
    assert pod_for_files["spec"]["volumes"] == [next(v for v in pod("learner")["volumes"] if v["name"] == "shared")]


def test_the_base_lists_every_file_of_its_folder() -> None:
    listed = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    assert {file.name for file in (FOLDER / "base").iterdir()} - {"kustomization.yaml"} == set(listed)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A copy of the job's folder with keys, as docs/kubernetes.md says."""
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    folder = tmp_path / "kubernetes" / "job"
    assert main(["keys", str(folder / "keys"), "--node", "fleet"]) == 0
    return folder


KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@KUBECTL
@pytest.mark.parametrize("autoscaled", [False, True])
@pytest.mark.slow
def test_kustomize_builds_the_job(job: Path, autoscaled: bool) -> None:
    if autoscaled:
        text = (job / "kustomization.yaml").read_text()
        text = re.sub(
            r"^replicas: .*$", "", text.replace("[../base]", "[../base, autoscaler.yaml]"), flags=re.MULTILINE
        )
        (job / "kustomization.yaml").write_text(text)
    done = subprocess.run(["kubectl", "kustomize", str(job)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    made = {(d["kind"], d["metadata"]["name"]): d for d in built}
    kept = [d for d in ALL if autoscaled or d["kind"] != "HorizontalPodAutoscaler"]
    assert {(d["kind"], d["metadata"]["name"]) for d in kept} < set(made)
    assert len(made) == len(kept) + len(JOB["configMapGenerator"]) + len(JOB["secretGenerator"])
    assert {d["metadata"]["namespace"] for d in built} == {JOB["namespace"]}
    assert made["Deployment", "slipstream-fleet"]["spec"].get("replicas") == (None if autoscaled else 4)
    assert {d.partition(":")[0] for d in names_in(built, "image")} == {image["newName"] for image in JOB["images"]}
    for document in built:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


@KUBECTL
@pytest.mark.slow
def test_the_component_of_models_mounts_a_path_of_the_machines_in_learner_and_nodes(job: Path) -> None:
    file = job / "kustomization.yaml"
    file.write_text(file.read_text() + "components: [../models]\n")
    done = subprocess.run(["kubectl", "kustomize", str(job)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    volume = {"name": "models", "hostPath": {"path": "/srv/models", "type": "Directory"}}
    mount = {"name": "models", "mountPath": "/models", "readOnly": True}
    pods = {d["metadata"]["name"]: d for d in yaml.safe_load_all(done.stdout) if d["kind"] in WORKLOADS.values()}
    for role in WORKLOADS:
        document = pods[f"slipstream-{role}"]
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
        spec = document["spec"]["template"]["spec"]
        expected = (role != "broker", role != "broker")
        assert (volume in spec["volumes"], mount in spec["containers"][0]["volumeMounts"]) == expected


# ---------------------------------------------------------------- the parts fit one another


@pytest.mark.parametrize("role", WORKLOADS)
def test_selectors_mounts_probes_and_claims_name_what_is_there(role: str) -> None:
    workload, labels = one(WORKLOADS[role], role), {"app": "slipstream", "role": role}
    assert workload["spec"]["template"]["metadata"]["labels"] == labels
    if role != "learner":  # a Job makes its own selector
        assert workload["spec"]["selector"]["matchLabels"] == labels
    spec, main_container = pod(role), container(role)
    claims = workload["spec"].get("volumeClaimTemplates", [])
    volumes = {v["name"] for v in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in main_container["volumeMounts"]} == volumes
    for key, there in (("secretName", "secretGenerator"), ("configMap", "configMapGenerator")):
        named = {found if isinstance(found, str) else found["name"] for found in names_in(spec, key)}
        assert named <= set(generated(there))
    assert set(names_in(spec, "claimName")) <= {"slipstream-shared"}
    ports = {port["name"]: port["containerPort"] for port in main_container["ports"]}
    probes = [found["httpGet"] for name, found in main_container.items() if name.endswith("Probe")]
    assert {probe["port"] for probe in probes} == {"health"} and ports["health"] == config().telemetry.health_port
    assert {probe["path"] for probe in probes} <= {"/healthz", "/readyz"}
    assert main_container["image"] in {image["name"] for image in JOB["images"]}
    assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False


def test_services_budget_policy_and_autoscaler_find_their_pods() -> None:
    for name in ("broker", "learner"):
        service = one("Service", name)["spec"]
        assert service["selector"] == {"app": "slipstream", "role": name} and service["clusterIP"] == "None"
        workload = one(WORKLOADS[name], name)["spec"]
        assert f"slipstream-{name}" in (workload.get("serviceName"), pod(name).get("subdomain"))
    assert one("PodDisruptionBudget", "fleet")["spec"]["selector"]["matchLabels"]["role"] == "fleet"
    target = one("HorizontalPodAutoscaler", "fleet")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "slipstream-fleet")
    assert one("PersistentVolumeClaim", "shared")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_commands_parse_and_name_the_config_the_keys_and_the_brokers_service() -> None:
    port = {p["name"]: p["port"] for p in one("Service", "broker")["spec"]["ports"]}["broker"]
    address = f"tcp://slipstream-broker:{port}"
    assert config().broker.address == address
    broker, node = parse(container("broker")["args"]), parse(container("fleet")["args"])
    program, *words = container("learner")["args"]
    learner = parse(words)
    assert (program, broker.command, learner.command, node.command) == ("slipstream", "broker", "learner", "rollout")
    (mounted,) = {m["mountPath"] for m in container("broker")["volumeMounts"] if m["name"] == "config"}
    (file,) = generated("configMapGenerator")["slipstream-config"]
    assert (broker.config, learner.config, node.config) == (f"{mounted}/{file}", None, None), "the broker hands it out"
    assert broker.overrides == [f"broker.address=tcp://0.0.0.0:{port}"]
    assert node.join == learner.join == address
    assert str(Path(node.credentials).parent) == learner.credentials == config().broker.credentials
    config(*learner.overrides, "weights.address=10.0.0.7")  # the keys exist
    defined = {entry["name"] for role in WORKLOADS for entry in container(role).get("env", [])}
    assert set(re.findall(r"\$\((\w+)\)", str(ALL))) == defined


def test_every_role_gets_the_keys_that_it_needs_and_no_others(job: Path, tmp_path: Path) -> None:
    mounted: dict[str, Path] = {}
    for name, files in generated("secretGenerator").items():
        mounted[name] = tmp_path / name
        mounted[name].mkdir()
        for file in files:
            shutil.copy(job / file, mounted[name])
    broker, learner, fleet = (mounted[f"slipstream-{role}-keys"] for role in WORKLOADS)
    assert load_server(broker).public == load_credential(learner, "learner").server_public
    assert load_allowed(broker) == load_allowed(learner)
    assert load_credential(broker, "observer").role == "observer"
    assert load_credential(fleet / Path(parse(container("fleet")["args"]).credentials).name, "node").name == "fleet"
    assert [file.name for file in fleet.iterdir()] == ["fleet.json"]
    assert not (learner / "server.json").exists()
    for reader, keys in (("broker", broker), ("learner", learner)):
        paths = [f"broker.credentials={keys}", "weights.address=10.0.0.7", MODEL]
        found = [p.key for p in problems(config(*paths), reader)]
        assert set(found) <= {"model.path", "tasks.dataset"}, "weights and rows are on the cluster"


def test_the_plan_accepts_the_config_and_the_pods_have_its_devices(job: Path, capsys: pytest.CaptureFixture) -> None:
    overrides = [f"broker.credentials={job / 'keys'}", MODEL, "tasks.dataset=data/train.jsonl"]
    assert main(["plan", str(job / "job.yaml"), *overrides]) == 0, capsys.readouterr().err
    learner, gpus = one("Job", "learner")["spec"], "nvidia.com/gpu"
    assert learner["completions"] == learner["parallelism"] == 1
    assert learner["completions"] == config().learner.machines
    assert int(container("learner")["resources"]["limits"][gpus]) == config().learner.world_size
    assert int(container("fleet")["resources"]["limits"][gpus]) == config().rollout.engine.tensor_parallel


def test_pods_may_drain_for_as_long_as_their_role_does() -> None:
    assert pod("learner")["terminationGracePeriodSeconds"] >= SHUTDOWN_TIMEOUT_S + 30
    *_, script = container("fleet")["lifecycle"]["preStop"]["exec"]["command"]
    waits_s = int(re.fullmatch(r"kill -TERM 1; sleep (\d+)", script)[1])  # type: ignore[index]
    assert config().rollout.drain_s + 20 <= waits_s <= pod("fleet")["terminationGracePeriodSeconds"] - 20


# ---------------------------------------------------------------- the image


def test_the_image_copies_what_exists_is_pinned_and_runs_slipstream_without_root() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    found = [(word, rest) for word, rest in lines]
    for rest in (rest for word, rest in found if word == "COPY"):
        *sources, _ = rest.split()
        assert all((ROOT / source).exists() for source in sources)
    images = [rest.split()[0] for word, rest in found if word == "FROM" and not rest.startswith("base-")]
    assert len(images) == 2 and all(re.search(r":\d+\.\d+\.\d+-", image) for image in images)
    stages = {rest.split(" AS ")[1].removeprefix("base-") for word, rest in found if word == "FROM" and " AS " in rest}
    assert stages == {i["name"].removeprefix("slipstream-") for i in JOB["images"]} | {"machine"}
    last = dict(found)
    packages = {str(p.relative_to(ROOT)) for p in ROOT.glob("*/") if (p / "__init__.py").exists()} - {"bench", "tests"}
    assert packages <= {rest.split()[0] for word, rest in found if word == "COPY"}
    assert last["USER"] == f"{pod('broker')['securityContext']['runAsUser']}:1000"
    assert yaml.safe_load(last["ENTRYPOINT"]) == ["tini", "--", "slipstream"]
    with pytest.raises(SystemExit) as ended:
        parse(yaml.safe_load(last["CMD"]))
    assert ended.value.code == 0
    *_, script = container("learner")["command"]
    assert (ROOT / Path(script).relative_to(last["WORKDIR"])).is_file()


def sent(path: str) -> bool:
    """Whether .dockerignore lets a file through: by its last rule for the file or a folder above it."""
    kept = True
    for rule in (line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")):
        pattern = re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if re.fullmatch(f"{pattern}(/.*)?", path):
            kept = rule.startswith("!")
    return kept


def test_the_builder_gets_every_file_of_what_the_image_copies_and_no_others() -> None:
    lines = re.findall(r"^COPY (.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    copied = {word for line in lines for word in line.split()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wanted = {file for file in tracked if file.partition("/")[0] in copied}
    assert {"launch/keys.py", "broker/journal/fence.lua", "launch/follow.sh"} <= wanted
    assert {file for file in tracked if sent(file)} == wanted
    for other in (".venv/bin/python", ".git/config", "runs/a/run.json", "launch/__pycache__/cli.cpython-311.pyc"):
        assert not sent(other)
    assert not sent("launch/cluster/kubernetes/my-job/keys/nodes/fleet.json")


def test_the_image_has_every_package_of_the_distribution_that_setup_asks_for() -> None:
    installs = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    (installed,) = re.findall(r"apt-get install -y --no-install-recommends ([^&]*)&&", installs)
    asked = re.findall(r"on Debian and Ubuntu: apt install (\S+)\"", (ROOT / "launch" / "setup.sh").read_text())
    assert {"python3-venv", "libnuma1"} == {*asked} <= {*installed.split()}
    assert "tini" in installed.split(), "the entry point, and a learner's command"


def test_compose_runs_a_whole_job_in_the_image_that_fits_the_machine() -> None:
    document = yaml.safe_load(FOLDER.with_name("compose.yaml").read_text())
    for name, service in document["services"].items():
        assert service["profiles"] == [name]
        at = FOLDER.parent / service["build"]["context"]
        assert at.resolve() == ROOT and at.joinpath(service["build"]["dockerfile"]).samefile(DOCKERFILE)
        role = service["build"]["args"]["ROLE"]
        assert f"base-{role}" in DOCKERFILE.read_text() and service["image"] == f"slipstream-{role}"
        up = parse(service["command"])
        assert (up.command, up.config, up.web) == ("up", "/job/config.yaml", True)
        job, models = service["volumes"]
        assert (job["target"], models.rpartition(":")[2]) == ("/job", "/models")
        assert job["bind"] == {"create_host_path": False}, "else a mistyped JOB becomes an empty folder of root"
        assert ("deploy" in service) == (name == "gpu")
    assert set(document["services"]) == {"gpu", "cpu"}


ROLE = "import signal, sys; signal.signal(15, lambda *_: sys.exit({drained})); print(1, flush=True); {then}"


@pytest.mark.parametrize(
    ("then", "drained", "told", "code"),
    [
        ("pass", 0, False, 0),
        ("sys.exit(3)", 0, False, 3),
        ("signal.pause()", 0, True, 143),
        ("signal.pause()", 2, True, 2),
    ],
)
def test_a_drained_learner_is_no_finished_one(then: str, drained: int, told: bool, code: int) -> None:
    role = [sys.executable, "-c", ROLE.format(drained=drained, then=then)]
    with subprocess.Popen(["bash", FOLDER / "until_done.sh", *role], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and until(process.stdout.readline)
        if told:
            process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == code


def test_the_code_of_a_learner_that_ends_between_a_signal_and_the_look_at_it_is_not_lost() -> None:
    slow = '() { [ "$1" != -0 ] || sleep 0.5; builtin kill "$@"; }'  # the role has ended before the look
    command = ["bash", FOLDER / "until_done.sh", sys.executable, "-c", ROLE.format(drained=2, then="signal.pause()")]
    environment = os.environ | {"BASH_FUNC_kill%%": slow}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and until(process.stdout.readline)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 2
