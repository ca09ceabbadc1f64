"""A run as a job of Slurm: what the script asks for, what it does when something ends, and a run that is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.cli import commands
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.folder import claim
from fedemu.ops.running.together import run_together
from fedemu.ops.stress.fleet import finished_rounds
from fedemu.protocol.errors import FedemuError

FAKE = """#!/bin/bash
# In place of python: it plays the coordinator and the supervisors of a job, as the files beside it say.
here=$(dirname "$0")
shift 2
case "$1 $2" in
"keys new") mkdir -p "$4" && touch "$4/machine.key" ;;
"coordinator --resume")
    echo "${5%:0}:4711" | sed s/0.0.0.0/there/ >"$3/address"; echo "$*" >>"$here/coordinators"; . "$here/coordinator" ;;
"device --n") echo "$SLURM_PROCID $*" >>"$here/devices"; . "$here/device" ;;
esac
"""
FOREVER = "while :; do sleep 0.05; done\n"


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        commands.command(list(words), prog_name="fedemu")
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_script_asks_for_what_was_said_and_freezes_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_ROUNDS", "3")
    said = ["--nodes", "3", "--time", "1-12", "--gpus-per-node", "2", "--cpus-per-node", "8", "--partition", "gpu"]
    more = ["--sbatch=--constraint=a100", "--set", "runtime.trainers=2", "--set", "fleet.give_up=20", "--out", "mine"]
    assert call("slurm", "digits-small", *said, *more) == 0
    script = (tmp_path / "mine" / "job.sh").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked[:9] == [
        "--job-name=digits-small",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--time=1-12",
        "--gpus-per-node=2",
        "--partition=gpu",
        "--constraint=a100",
        "--signal=B:USR1@180",
    ]
    assert "export FEDEMU_RUNTIME__TRAINERS=2\n" in script
    assert "unset FEDEMU_ROUNDS" in script
    frozen, _ = load_experiment(tmp_path / "mine" / "config.toml", (), {})
    assert (frozen.rounds, frozen.fleet.give_up, frozen.fleet.start_timeout) == (3, 20.0, 600.0)
    told = capsys.readouterr().err
    assert "submit   sbatch mine/job.sh" in told
    assert "3, each with 6 or 7 devices" in told
    assert "36.0 h are the limit" in told


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=a b", '--comment="a b"'),
        ("--comment=run #3", '--comment="run #3"'),
        ("--constraint=rack1&gpu", "--constraint=rack1&gpu"),
        ('--comment="a b"', '--comment="a b"'),
        ("--comment=a\\ b", "--comment=a\\ b"),
        ("-p gpu", "-p gpu"),
    ],
)
def test_sbatch_reads_a_value_with_blanks_as_one(option: str, line: str, tmp_path: Path) -> None:
    assert call("slurm", "digits-small", "--sbatch", option, "--out", "mine") == 0
    assert f"\n#SBATCH {line}\n" in (tmp_path / "mine" / "job.sh").read_text()


def test_devices_have_the_metrics_port_after_that_of_the_coordinator_on_their_node(tmp_path: Path) -> None:
    assert call("slurm", "digits-small", "--set", "runtime.metrics_port=9464", "--out", "mine") == 0
    script = (tmp_path / "mine" / "job.sh").read_text()
    assert "export FEDEMU_RUNTIME__METRICS_PORT=9464\n" in script
    assert '--state "$run/devices/$place" --metrics-port 9465\n' in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "21"], "--nodes 21 is more than the 20 devices of the experiment; say less"),
        (["--devices", "2000000000", "--nodes", "1000000000"], "--nodes 1000000000 must be from 1 to 100000"),
        (["--nodes", "0"], "--nodes 0 must be from 1 to 100000"),
        (["--time", "soon"], "--time 'soon' is no time limit; write it as in 90, 4:00:00 or 2-12:00:00"),
        (["--time", "5"], "--time 5 is too short: the run is stopped 180 s before; say at least 6 minutes"),
        (["--partition", "a b"], "--partition 'a b' is no name that Slurm knows"),
        (["--sbatch", "mem=3"], "--sbatch 'mem=3' is no option"),
        (["--out", 'a"b'], "choose another folder with --out"),
        (["--out", "a\\b"], "choose another folder with --out"),
        (["--set", "local.lr=0"], "local.lr = 0 must be from 1e-38 to 1e+38"),
        (["--set", "runtime.metrics_port=65535"], "runtime.metrics_port = 65535 leaves no port after it"),
        (["--set", "tree.edges=[1, 2]"], "fedemu slurm starts no edges, and tree.edges asks for them; add --set"),
        (["--set", "runtime.transport=memory"], "runtime.transport = memory is one process; add --set runtime.tr"),
        (["--submit"], "there is no sbatch on this machine; leave out --submit, and"),
    ],
)
def test_what_slurm_could_not_read_is_refused_and_leaves_nothing(
    words: Sequence[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call("slurm", "digits-small", *words) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_a_full_disk_does_not_take_leaves_no_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str) -> None:
        raise FedemuError(f"{path.name} cannot be written: the disk is full; make room there")

    monkeypatch.setattr("fedemu.ops.engines.slurm.write_for_people", full)
    assert call("slurm", "digits-small", "--out", "mine") == 5
    assert capsys.readouterr().err == "fedemu: job.sh cannot be written: the disk is full; make room there\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def play(slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plays a job of two nodes with a coordinator and supervisors that do what the scripts given say.

    Returns its exit code, the lives of its coordinator, and the words of its supervisors. ``notice`` tells the job that
    its time is nearly over as soon as a supervisor is there.
    """

    def playing(coordinator: str, device: str, *, notice: bool = False) -> tuple[int, int, list[str]]:
        python = tmp_path / "python"
        python.write_text(FAKE)
        python.chmod(0o755)
        (tmp_path / "coordinator").write_text(f"trap 'touch $here/stopped; exit 4' TERM\n{coordinator}\n")
        (tmp_path / "device").write_text(device)
        monkeypatch.setattr(sys, "executable", str(python))
        assert call("slurm", "digits-small", "--nodes", "2", "--out", "run") == 0
        monkeypatch.undo()
        job = slurm.submit(tmp_path / "run" / "job.sh")
        devices = tmp_path / "devices"
        if notice:
            slurm.until(devices.exists, "a supervisor")
            slurm.notice(job)
        code = slurm.wait(job)
        lives = (tmp_path / "coordinators").read_text().splitlines()
        return code, len(lives), sorted(devices.read_text().splitlines()) if devices.exists() else []

    return playing


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("", "tcp://node-1:4711"),
        ("0.0.0.0", "tcp://node-1:4711"),
        ("*", "tcp://node-1:4711"),
        ("[::]", "tcp://node-1:4711"),
        ("127.0.0.2", "tcp://127.0.0.2:4711"),
        ("[fd00::4]", "tcp://[fd00::4]:4711"),
    ],
)
def test_nodes_look_for_the_coordinator_where_it_listens(listen: str, address: str, slurm: Any, play: Any) -> None:
    slurm.environment["LISTEN"] = listen
    there = 'until [ -e "$here/done" ]; do sleep 0.05; done'
    code, _, devices = play(there, '[ "$SLURM_PROCID" = 0 ] || touch "$here/done"')
    assert code == 0
    assert [line.split()[5] for line in devices] == [address, address]


def test_each_node_gets_its_part_and_a_supervisor_that_was_killed_is_started_again(play: Any, tmp_path: Path) -> None:
    killed = '[ "$SLURM_PROCID" = 0 ] || exit 0; mkdir "$here/once" 2>/dev/null && kill -9 $$; touch "$here/done"'
    code, lives, devices = play('until [ -e "$here/done" ]; do sleep 0.05; done', killed)
    assert (code, lives) == (0, 1)
    assert [line.split()[0] for line in devices] == ["0", "0", "1"]
    run = tmp_path / "run"
    assert devices[2] == (
        f"1 device --n 10 --connect tcp://127.0.0.1:4711 --keys {run}/keys/node-1 "
        f"--server-key {run}/keys/machine.key --state {run}/devices/1"
    )


def test_supervisors_that_are_refused_end_the_job_with_their_code(play: Any) -> None:
    assert play(FOREVER, "exit 3")[:2] == (3, 1)


def test_a_run_that_is_complete_ends_the_job_at_once(play: Any) -> None:
    assert play('rm "$3/address"; exit 0', "exit 0") == (0, 1, [])


def test_before_the_time_limit_the_job_stops_the_run_and_queues_itself_again(play: Any) -> None:
    stopped = 'until [ -e "$here/stopped" ]; do sleep 0.05; done'
    again = '[ -z "$SLURM_RESTART_COUNT" ] || exit 0'
    code, lives, devices = play(f"{again}\n{FOREVER}", stopped, notice=True)
    assert (code, lives) == (0, 2)
    assert {line.split()[0] for line in devices} <= {"0", "1"}


def test_a_job_here_is_none_of_another_cluster_on_this_machine(slurm: Any, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f'#SBATCH --nodes=1\n#SBATCH --output="{tmp_path}/%j"\nsleep 60\n')
    job = slurm.submit(script)
    slurm.until(lambda: slurm.processes(job, "sleep"), "the job")
    assert type(slurm)(tmp_path / "other").processes(job, "") == []


@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_whose_coordinator_is_killed_has_the_digest_of_a_run_alone(
    slurm: Any, tmp_path: Path
) -> None:
    settings = ["rounds=8", "runtime.trainers=1", "runtime.per_process=10", "runtime.report=false"]
    overrides = [word for setting in settings for word in ("--set", setting)]
    assert call("slurm", "digits-small", *overrides, "--nodes", "2", "--out", "run") == 0
    job = slurm.submit(tmp_path / "run" / "job.sh")
    slurm.until(lambda: finished_rounds(tmp_path / "run") >= 2, "round 2")
    min(slurm.processes(job, "coordinator"), key=lambda process: process.create_time()).kill()
    assert slurm.wait(job) == 0
    assert "not done yet; it goes on when Slurm starts it again" in (tmp_path / "run" / f"slurm-{job}.out").read_text()
    experiment, runtime = load_experiment("digits-small", [*settings, "runtime.transport=memory"], {})
    alone = claim(experiment, tmp_path / "alone")
    assert run_together(alone, experiment, runtime, new=True, print_summary=False) == 0
    ends = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone")]
    assert ends[0]["model_digest"] == ends[1]["model_digest"]
    assert not ends[0]["perturbed"]
