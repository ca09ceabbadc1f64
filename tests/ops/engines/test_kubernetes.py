"""A run on Kubernetes and in containers: manifests and files by their schemas, and the commands of the pods."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from fedemu.ops.cli import commands
from fedemu.ops.keys.store import KeyFolder

ROOT = Path(__file__).parents[3]
FAKE = """#!/bin/bash
echo "$*" >"$HOME/said"
exit "${CODE:-0}"
"""


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        commands.command(list(words), prog_name="fedemu")
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """All objects of a folder, by kind and name."""
    documents = [one for file in sorted(folder.iterdir()) for one in yaml.safe_load_all(file.read_text())]
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}


def container(objects: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = objects[name]["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize(
    "more",
    [(), ("--gpus", "2", "--data", "sets", "--set", "runtime.allow_code=['mine']")],
    ids=["plain", "all"],
)
def test_every_object_is_what_its_schema_says(more: Sequence[str], tmp_path: Path) -> None:
    assert call("kubernetes", "digits-small", "--machines", "3", "--out", "out", *more) == 0
    objects = written(tmp_path / "out")
    assert sorted(objects) == [
        "ConfigMap/digits-small",
        "NetworkPolicy/digits-small",
        "Secret/digits-small-coordinator",
        "Secret/digits-small-devices",
        "Service/digits-small",
        "Service/digits-small-devices",
        "StatefulSet/digits-small",
        "StatefulSet/digits-small-devices",
    ]
    for one in objects.values():
        kubernetes_validate.validate(one, "1.33", strict=True)


def test_the_experiment_decides_on_machines_resources_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_RUNTIME__LOG_LEVEL", "debug")
    said = [
        "--machines",
        "3",
        "--cpus",
        "4",
        "--gpus",
        "2",
        "--storage",
        "20Gi",
        "--data",
        "sets",
        "--image",
        "r.io/f:1",
    ]
    column = "x\N{ZERO WIDTH JOINER}\N{LINE SEPARATOR}\N{SNAKE}"
    said += ["--set", f"data.label_column={column}"]
    assert call("kubernetes", "digits-small", *said, "--rounds", "7") == 0
    folder = tmp_path / "kubernetes-digits-small"
    assert "kubectl apply -f kubernetes-digits-small" in capsys.readouterr().err
    assert (folder / "secrets.yaml").stat().st_mode & 0o777 == 0o600
    objects = written(folder)
    frozen = tomllib.loads(objects["ConfigMap/digits-small"]["data"]["config.toml"])
    assert (frozen["rounds"], frozen["fleet"]["give_up"]) == (7, 600.0)
    assert frozen["data"]["label_column"] == column
    supervisor = container(objects, "StatefulSet/digits-small-devices")
    assert objects["StatefulSet/digits-small-devices"]["spec"]["replicas"] == 3
    assert "fedemu device --n $count --connect tcp://digits-small:5577" in supervisor["args"][0]
    said_first = (folder / "manifests.yaml").read_text().splitlines()[0]
    assert said_first.endswith("on Kubernetes: a coordinator and 3 machines with 6 or 7 devices each.")
    assert "--trainers 2" in supervisor["args"][0]
    assert supervisor["resources"]["requests"]["cpu"] == "4"
    assert supervisor["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "FEDEMU_RUNTIME__LOG_LEVEL", "value": "debug"} in supervisor["env"]
    assert {"name": "FEDEMU_DATA", "value": "/data"} in supervisor["env"]
    coordinator = objects["StatefulSet/digits-small"]["spec"]
    assert coordinator["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] == "20Gi"
    assert supervisor["image"] == container(objects, "StatefulSet/digits-small")["image"] == "r.io/f:1"


def test_devices_that_sleep_ask_for_no_memory(tmp_path: Path) -> None:
    asked: dict[str, int] = {}
    for wake in ("at-once", "on-demand"):
        more = ("--devices", "1400", "--set", f"fleet.wake={wake}", "--out", wake)
        assert call("kubernetes", "digits-small", "--machines", "2", *more) == 0
        supervisor = container(written(tmp_path / wake), "StatefulSet/digits-small-devices")
        asked[wake] = int(supervisor["resources"]["requests"]["memory"].removesuffix("Mi"))
    assert asked["at-once"] > 768 + 2 * 400 + 700 * 6
    assert asked["on-demand"] < 768 + 2 * 400 + 100


def memory(folder: Path, name: str) -> tuple[int, int]:
    """What a pod asks for, and its limit, in MiB."""
    asked = container(written(folder), f"StatefulSet/{name}")["resources"]
    of_request, of_limit = (asked[kind]["memory"].removesuffix("Mi") for kind in ("requests", "limits"))
    return int(of_request), int(of_limit)


@pytest.mark.parametrize(
    ("hidden", "variables", "stack"),
    [(1000, 1_076_010, 16), (2900, 8_630_410, 4)],
)
def test_the_memory_grows_with_the_model(hidden: int, variables: int, stack: int, tmp_path: Path) -> None:
    sized = ("--machines", "2", "--cpus", "3", "--set", "fleet.per_round=4", "--set", "fleet.over_selection=1")
    assert variables == 64 * hidden + hidden + hidden * hidden + hidden + hidden * 10 + 10
    assert call("kubernetes", "digits-small", *sized, "--set", f"model.hidden=[{hidden},{hidden}]", "--out", "o") == 0
    size = 4 * variables
    coordinator = 2048 + 12 * size // 2**20
    processes = 768 + (10 * (6 * 2**20 + 2**18) + 3 * 400 * 2**20) // 2**20
    machine = processes + (3 * 10 * stack * size + 4 * 3 * size) // 2**20
    assert memory(tmp_path / "o", "digits-small") == (coordinator, 2 * coordinator)
    assert memory(tmp_path / "o", "digits-small-devices") == (machine, 2 * machine)
    text = (tmp_path / "o" / "manifests.yaml").read_text()
    assert f"# Memory: {processes} MiB for its processes, 3 times the model (" in text
    assert f"(3 × {stack}). The limit is twice this." in text


def test_without_its_data_the_model_is_not_counted_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("kubernetes", "digits-small", "--set", "data.dataset=nowhere.csv", "--out", "o") == 0
    assert capsys.readouterr().err.startswith(
        "the memory of the model is not counted in the manifests, because it can't be made here (its data are not on "
        "this machine); if it is large, raise what they ask for\n"
    )
    assert memory(tmp_path / "o", "digits-small") == (2048, 4096)
    assert (
        "# Memory: 2048 MiB, without the model. The limit is twice this.\n"
        in (tmp_path / "o" / "manifests.yaml").read_text()
    )


def test_only_machines_compute_on_gpus(tmp_path: Path) -> None:
    assert call("kubernetes", "digits-small", "--gpus", "1", "--set", "runtime.device_type=cuda", "--out", "out") == 0
    objects = written(tmp_path / "out")
    types = {}
    for name in ("digits-small", "digits-small-devices"):
        pod = container(objects, f"StatefulSet/{name}")
        told = [one["value"] for one in pod["env"] if one["name"] == "FEDEMU_RUNTIME__DEVICE_TYPE"]
        types[name] = (pod["resources"]["limits"].get("nvidia.com/gpu"), *told)
    assert types == {"digits-small": (None, "cpu"), "digits-small-devices": (1, "cuda")}


def test_a_machine_that_moves_takes_its_lease_and_its_own_states_along(tmp_path: Path) -> None:
    assert call("kubernetes", "digits-small", "--machines", "3", "--machine-storage", "500Mi", "--out", "out") == 0
    objects = written(tmp_path / "out")
    machines = objects["StatefulSet/digits-small-devices"]["spec"]
    [claim] = machines["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "500Mi"
    [mount] = [
        mount
        for mount in container(objects, "StatefulSet/digits-small-devices")["volumeMounts"]
        if mount["name"] == claim["metadata"]["name"]
    ]
    assert f"--state {mount['mountPath']} " in container(objects, "StatefulSet/digits-small-devices")["args"][0]
    assert machines["podManagementPolicy"] == "Parallel", "they all have to be there before the run begins"
    named = objects[f"Service/{machines['serviceName']}"]["spec"]
    assert named == {"clusterIP": "None", "selector": machines["selector"]["matchLabels"]}


@pytest.fixture
def pods(tmp_path: Path) -> Any:
    """Starts the command of a pod: the folders of the pod are in ``tmp_path``, and its ``fedemu`` takes notes."""
    assert call("kubernetes", "digits-small", "--machines", "3", "--out", "out") == 0
    objects = written(tmp_path / "out")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fedemu").write_text(FAKE)
    (tmp_path / "bin" / "fedemu").chmod(0o755)

    def start(name: str, secret: str, code: int = 0, place: int = 0) -> subprocess.Popen[bytes]:
        for folder in ("secret", "experiment", "work", "tmp"):
            (tmp_path / folder).mkdir(exist_ok=True)
        for key, text in objects[f"Secret/{secret}"]["stringData"].items():
            (tmp_path / "secret" / key).write_text(text)
        (tmp_path / "experiment" / "config.toml").write_text(objects["ConfigMap/digits-small"]["data"]["config.toml"])
        script = re.sub(r"/(secret|experiment|tmp)/", rf"{tmp_path}/\1/", container(objects, name)["args"][0])
        host = f"{name.removeprefix('StatefulSet/')}-{place}"
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "CODE": str(code)}
        path["HOSTNAME"] = host
        return subprocess.Popen(["bash", "-c", script], cwd=tmp_path / "work", env=path, start_new_session=True)

    return start


def test_the_pod_of_the_coordinator_has_usable_keys_and_waits_with_its_results(pods: Any, tmp_path: Path) -> None:
    pod = pods("StatefulSet/digits-small", "digits-small-coordinator")
    try:
        while not (tmp_path / "tmp" / "over").exists():
            assert pod.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()
    assert (tmp_path / "said").read_text().startswith("coordinator --resume run --bind tcp://0.0.0.0:5577 --keys ")
    assert (tmp_path / "work" / "run" / "config.toml").is_file()
    keys = KeyFolder(tmp_path / "tmp" / "keys")
    keys.require_own()
    secrets = written(tmp_path / "out")
    assert keys.pair()[0] in secrets["Secret/digits-small-devices"]["stringData"]["coordinator.key"]
    [approved] = keys.approved().values()
    assert approved in secrets["Secret/digits-small-devices"]["stringData"]["machine.key"]


def test_a_coordinator_that_was_killed_while_it_copied_the_experiment_begins_with_all_of_it(
    pods: Any, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "traces.json").write_text("{}")
    dies_once = '[ "$1" = -L ] && mkdir "$HOME/once" 2>/dev/null && /bin/cp -L "$2" "${@: -1}" && kill -9 $PPID'
    (tmp_path / "bin" / "cp").write_text(f'#!/bin/bash\n{dies_once} || exec /bin/cp "$@"\n')
    (tmp_path / "bin" / "cp").chmod(0o755)
    coordinator = "StatefulSet/digits-small", "digits-small-coordinator"
    assert pods(*coordinator).wait(60) == -signal.SIGKILL
    assert pods(*coordinator, code=5).wait(60) == 5
    assert sorted(file.name for file in (tmp_path / "work" / "run").iterdir()) == ["config.toml", "traces.json"]
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["run"]


@pytest.mark.parametrize(("place", "count"), [(0, 7), (1, 7), (2, 6)])
def test_the_machines_divide_the_devices_evenly(place: int, count: int, pods: Any, tmp_path: Path) -> None:
    pods("StatefulSet/digits-small-devices", "digits-small-devices", code=4, place=place).wait(60)
    assert (tmp_path / "said").read_text().startswith(f"device --n {count} --connect tcp://digits-small:5577 --keys ")


def test_a_machine_that_is_told_of_an_interruption_ends_and_so_is_started_again(pods: Any, tmp_path: Path) -> None:
    pod = pods("StatefulSet/digits-small-devices", "digits-small-devices", code=4)
    assert pod.wait(60) == 4
    assert not (tmp_path / "tmp" / "over").exists()
    KeyFolder(tmp_path / "tmp" / "keys").pair()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--machines", "21"], "--machines 21 is more than the 20 devices of the experiment; say less"),
        (["--name", "Big"], "--name 'Big' is no name for Kubernetes"),
        (["--name", "on"], "--name 'on' is no name for Kubernetes"),
        (["--image", 'a"b'], "is no image; write it as in registry.example/fedemu:0.1"),
        (["--storage", "much"], "--storage 'much' is no size; write it as in 500Mi or 10Gi"),
        (["--machine-storage", "0Gi"], "--machine-storage '0Gi' is no size; write it as in 500Mi or 10Gi"),
        (["--cpus", "1025"], "--cpus 1025 must be from 1 to 1024"),
        (["--gpus", "0"], "--gpus 0 must be from 1 to 1024"),
        (["--set", "tree.edges=2"], "fedemu kubernetes starts no edges, and tree.edges asks for them; add --set"),
        (["--set", "runtime.transport=memory"], "runtime.transport = memory is one process; add --set runtime.tr"),
        (["--out", "there"], "there cannot be written: File exists; choose another --out"),
    ],
)
def test_what_kubernetes_could_not_take_is_refused(
    words: Sequence[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").touch()
    assert call("kubernetes", "digits-small", *words) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_commands_that_are_told_can_be_given_to_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("kubernetes", "digits-small", "--out", "my run") == 0
    assert "  start    kubectl apply -f 'my run'\n" in capsys.readouterr().err


def test_a_disk_that_takes_only_a_part_of_the_files_gets_none_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files_end_at: Any
) -> None:
    with files_end_at(4000):
        assert call("kubernetes", "digits-small", "--out", "there") == 5
    assert capsys.readouterr().err == "fedemu: there/manifests.yaml cannot be written: File too large\n"
    assert [*tmp_path.iterdir()] == []


def test_the_compose_file_is_what_its_schema_says() -> None:
    options = compose_spec.PyOptions()
    options.apply_merge = True
    text = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", (ROOT / "compose.yaml").read_text())  # as Compose does first
    compose = options.from_yaml(text.replace("$$", "$"))
    compose.validate()
    assert sorted(compose.service_names()) == ["coordinator", "devices", "keys"]
    # The keys are ready, and the machines leave, before the coordinator has ended.
    commands = [*re.findall("docker compose up.*", text + (ROOT / "docs" / "clusters.md").read_text())]
    assert commands == ["docker compose up --build", "docker compose up"]


def test_the_dockerfile_has_no_finding() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None
    ended = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
