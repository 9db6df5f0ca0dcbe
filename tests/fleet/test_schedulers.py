"""Files for SLURM and KubeRay. The options of sbatch are those of its documentation (slurm.schedmd.com/sbatch.html);
the schema of RayJob has the fields of KubeRay's API that are used (ray.io/v1, KubeRay 1.7), and refuses others."""

import json
import re
import shutil
import subprocess

import jsonschema
import pytest

from etude.config import FleetConfig, RLConfig, validate
from etude.errors import UserError
from etude.fleet import Machine, kuberay_files, slurm_files

CONFIG = {"name": "My_run", "tasks": {"repository": "r"}}
RAY = {
    "engines": [{"name": "eu", "placer": "ray", "count": 3, "cpus": 3.5}, {"name": "us", "placer": "ray", "cpus": 2}],
    "players": {"placer": "ray", "count": 2, "cpus": 2},
    "trainer": {"placer": "ray"},
}
# Options with a value that a script may have, and what the value looks like.
SBATCH = {
    "account": r"\S+",
    "array": r"\d+(-\d+)?(%\d+)?",
    "chdir": r"\S+",
    "constraint": r"\S+",
    "cpus-per-task": r"\d+",
    "error": r"\S+",
    "exclusive": r"user|mcs|topo",
    "export": r"\S+",
    "gpus": r"(\w+:)?\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "gpus-per-task": r"(\w+:)?\d+",
    "gres": r"\S+",
    "job-name": r"\S+",
    "mem": r"\d+[KMGT]?",
    "mem-per-cpu": r"\d+[KMGT]?",
    "nodes": r"\d+(-\d+)?",
    "ntasks": r"\d+",
    "ntasks-per-node": r"\d+",
    "open-mode": r"append|truncate",
    "output": r"\S+",
    "partition": r"\S+",
    "signal": r"([RB]+:)?\w+(@\d+)?",
    "time": r"[\d:-]+",
}
FLAGS = {"requeue", "no-requeue", "exclusive", "parsable"}


def run_of(**tables) -> RLConfig:
    return validate(RLConfig, CONFIG | tables, "run.toml")


def fleet_of(tables) -> FleetConfig:
    return validate(FleetConfig, tables, "fleet.toml")


def parts(script: str) -> list[dict[str, str]]:
    """The options of each component of a job, all of which sbatch knows."""
    out: list[dict[str, str]] = [{}]
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "sbatch reads none after the first command"
    for line in lines[1:first]:
        words = line.removeprefix("#SBATCH ")
        if words == "hetjob":
            out.append({})
            continue
        name, equals, value = words.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value) if equals else name in FLAGS, line
        out[-1][name] = value
    return out


def check_bash(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_a_cluster_of_ray_is_a_heterogeneous_job():
    config = run_of(trainer={"device": "cuda", "mesh": {"shard": 16}})
    files = slurm_files(fleet_of(RAY), config, ("/c/run.toml", "/c/my fleet.toml"))
    assert [*files] == ["ray.sbatch"]
    script = files["ray.sbatch"]
    check_bash(script)
    sizes = [(p["nodes"], p["cpus-per-task"], p.get("gpus-per-node")) for p in parts(script)]
    assert sizes == [("1", "4", None), ("1", "12", None), ("1", "2", None), ("1", "4", None), ("2", "8", "8")]
    assert all("exclusive" in part for part in parts(script))  # two nodes of Ray on one machine do not start
    assert parts(script)[0]["job-name"] == "my-run-ray"
    assert "export RAY_AUTH_MODE=token" in script
    assert [*map(int, re.findall(r"--het-group=(\d)", script))] == [1, 2, 3, 4]
    assert "etude train /c/run.toml --fleet '/c/my fleet.toml' &" in script
    assert "etude train --resume outputs/My_run &" in script


def test_a_fleet_without_ray_is_a_job_of_one_node_and_another_that_adds_to_it():
    tables = {"engines": [{"name": "eu", "count": 2, "gpus": 2, "cpus": 4}], "players": {"cpus": 3}}
    config = run_of(inference={"device": "cuda:1"}, trainer={"device": "cuda"})
    files = slurm_files(fleet_of(tables), config, ("run.toml", "fleet.toml"))
    sizes = {}
    for name, script in files.items():
        check_bash(script)
        (options,) = parts(script)
        sizes[name] = options["nodes"], options["cpus-per-task"], options["gpus-per-node"]
    assert sizes == {"run.sbatch": ("1", "16", "5"), "up.sbatch": ("1", "11", "4")}
    assert files["up.sbatch"].endswith("exec etude fleet up fleet.toml outputs/My_run\n")


def test_engines_share_machines():
    tables = {"engines": [{"name": "eu", "placer": "ray", "count": 5, "cpus": 4, "gpus": 2}]}
    config = run_of(inference={"device": "cuda:1"}, trainer={"device": "cuda"})
    for machine, size in ((Machine(), ("2", "16", "8")), (Machine(16, 4), ("3", "8", "4"))):
        script = slurm_files(fleet_of(tables), config, ("run.toml", "fleet.toml"), machine)["ray.sbatch"]
        part = parts(script)[1]
        assert (part["nodes"], part["cpus-per-task"], part["gpus-per-node"]) == size
    with pytest.raises(UserError, match="eu needs 4 CPUs and 2 GPUs, and a machine has 64 and 1"):
        slurm_files(fleet_of(tables), config, ("run.toml", "fleet.toml"), Machine(64, 1))


def test_a_job_of_slurm_has_a_head_of_its_own():
    tables = {"engines": [{"name": "eu", "placer": "ray", "address": "h:1"}]}
    with pytest.raises(UserError, match='in place of "h:1"'):
        slurm_files(fleet_of(tables), run_of(), ("run.toml", "fleet.toml"))


@pytest.mark.parametrize("there", [True, False])
def test_the_script_resumes_a_run_that_is_there(tmp_path, there):
    script = slurm_files(fleet_of({"engines": [{"name": "eu"}]}), run_of(), ("run.toml", "fleet.toml"))["run.sbatch"]
    etude = tmp_path / "etude"
    etude.write_text('#!/bin/sh\necho "$@" > "$SLURM_SUBMIT_DIR/words"\n')
    etude.chmod(0o755)
    if there:
        (tmp_path / "outputs" / "My_run").mkdir(parents=True)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    subprocess.run([shutil.which("bash") or "bash"], input=script, text=True, env=env, timeout=20, check=True)
    words = "train --resume outputs/My_run" if there else "train run.toml --fleet fleet.toml"
    assert (tmp_path / "words").read_text() == f"{words}\n"


def table(needed: list[str], **properties) -> dict:
    return {"type": "object", "additionalProperties": False, "required": needed, "properties": properties}


TEXT, TRUTH, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?[kMGTm]?i?$"}}
CONTAINER = table(
    ["name", "image"],
    name=LABEL,
    image=TEXT,
    workingDir=TEXT,
    envFrom={"type": "array", "items": table([], secretRef=table(["name"], name=LABEL, optional=TRUTH))},
    lifecycle=table([], preStop=table([], exec=table([], command={"type": "array", "items": TEXT}))),
    resources=table([], limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts={"type": "array", "items": table(["name", "mountPath"], name=LABEL, mountPath=TEXT)},
)
VOLUME = table(
    ["name"],
    name=LABEL,
    persistentVolumeClaim=table(["claimName"], claimName=LABEL),
    configMap=table(["name"], name=LABEL),
)
POD = table(
    ["spec"],
    spec=table(
        ["containers"],
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME},
        terminationGracePeriodSeconds=COUNT,
    ),
)
WORKERS = table(
    ["groupName", "minReplicas", "maxReplicas", "template"],
    groupName=LABEL,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
CLUSTER = table(
    ["headGroupSpec"],
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},  # needed, with tokens
    authOptions=table(["mode"], mode={"enum": ["disabled", "token"]}),
    headGroupSpec=table(["template"], rayStartParams=TEXTS, template=POD),
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
RAYJOB = table(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=table(["name"], name={**LABEL, "maxLength": 47}),
    spec=table(
        ["entrypoint", "rayClusterSpec"], entrypoint=TEXT, shutdownAfterJobFinishes=TRUTH, rayClusterSpec=CLUSTER
    ),
)


def test_kuberay_gets_a_job_and_its_configurations():
    tables = {**RAY, "engines": [{"name": "eu", "placer": "ray", "count": 3, "cpus": 3.5, "gpus": 2}]}
    config = run_of(inference={"device": "cuda:4"}, trainer={"device": "cuda", "mesh": {"shard": 4}})
    texts = {"run.toml": "a = 1\n", "fleet.toml": ""}
    files = kuberay_files(fleet_of(tables), config, texts, image="registry/etude:1", claim="runs")
    configuration, job = json.loads(files["configuration.json"]), json.loads(files["rayjob.json"])
    assert configuration["data"] == texts
    assert configuration["metadata"] == job["metadata"] == {"name": "etude-my-run"}
    jsonschema.validate(job, RAYJOB)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    shares = {
        group["groupName"]: (group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["limits"])
        for group in cluster["workerGroupSpecs"]
    }
    assert shares == {
        "eu": (3, {"cpu": "4", "nvidia.com/gpu": "2"}),
        "players": (2, {"cpu": "2"}),
        "trainer": (1, {"cpu": "4", "nvidia.com/gpu": "4"}),
    }
    words = subprocess.run(["bash", "-c", f"printf '%s|' {job['spec']['entrypoint']}"], capture_output=True, text=True)
    assert words.stdout.startswith("bash|-c|cd /etude/work && if [ -d outputs/My_run ]; then etude train --resume")


@pytest.mark.parametrize(("tables", "sentence"), [
    ({"engines": [{"name": "eu"}]}, r'eu has placer = "local"'),
    ({"engines": [{"name": "eu", "placer": "ray", "address": "h:1"}]}, r'in place of "h:1"'),
    ({"engines": [{"name": "eu", "placer": "attach", "urls": ["http://a"]}]}, r"places nothing in Ray"),
])  # fmt: skip
def test_kuberay_starts_what_ray_places(tables, sentence):
    with pytest.raises(UserError, match=sentence):
        kuberay_files(fleet_of(tables), run_of(), {}, image="i", claim="c")
