"""What ``fedemu run`` makes of its options before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedemu.device.host import processors
from fedemu.ops.cli import commands, opening, run, sweep
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment, read_frozen
from fedemu.ops.running.folder import claim
from fedemu.ops.running.seeds import SeedGroup
from fedemu.protocol.errors import FedemuError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Runtime]:
    """The settings of the machine of every run that is started. None of them runs."""
    runtimes: list[Runtime] = []

    def together(directory: Path, experiment: Any, runtime: Runtime, **_: Any) -> int:
        runtimes.append(runtime)
        return 0

    def group(given: SeedGroup, **_: Any) -> int:
        runtimes.append(given.runtime)
        return 0

    monkeypatch.setattr(run, "run_together", together)
    monkeypatch.setattr(run, "run_group", group)
    for place in (run, opening):
        monkeypatch.setattr(place, "require_engine", lambda on: None)
    return runtimes


@pytest.mark.parametrize("several", [False, True])
def test_a_run_that_is_resumed_on_an_engine_waits_as_long_as_a_new_one(
    several: bool, started: list[Runtime], tmp_path: Path
) -> None:
    begun = claim(load_experiment("digits-small", ["seed=3"], {})[0], tmp_path / "group" / "seed-3")
    where = str(begun.parent if several else begun)
    for more in ([], ["--set", "runtime.lost_seconds=30"]):
        with pytest.raises(SystemExit):
            commands.command(["run", "--resume", where, "--on", "ray", *more], prog_name="fedemu")
    assert [(runtime.connect_seconds, runtime.lost_seconds) for runtime in started] == [(600, 600), (600, 30)]


FORGOTTEN = ("--set", "replay.capacity=500")
TOLD = 'warning: replay.capacity = 500 has no effect, because replay.strategy = "none" keeps no samples\n'


@pytest.mark.parametrize("several", [(), ("--seeds", "3,4")])
def test_a_setting_that_has_no_effect_is_told_once_when_a_run_begins(
    several: Sequence[str], started: list[Runtime], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new"
    for more in (["digits-small", "--out", str(out), *FORGOTTEN], ["--resume", str(out)]):
        with pytest.raises(SystemExit):
            commands.command(["run", *more, *several], prog_name="fedemu")
    assert (len(started), capsys.readouterr()) == (2, ("", TOLD))


def test_a_sweep_tells_once_what_has_no_effect_in_all_of_its_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "run_sweep", lambda *_: 0)
    words = ["sweep", "digits-small", "--out", str(tmp_path / "new"), "--seeds", "0-2", *FORGOTTEN]
    for more in (["--list"], [], ["--grid", "evaluate.full_every=2,5", "--set", "runtime.trainers=3"]):
        with pytest.raises(SystemExit):
            commands.command([*words, *more], prog_name="fedemu")
    told = (
        "warning: evaluate.full_every = 2, 5 has no effect, because evaluate.samples = 0 evaluates every time on all "
        "test samples\n"
        'warning: runtime.trainers = 3 has no effect, because runtime.transport = "memory" runs everything in one '
        "process\n"
    )
    assert capsys.readouterr().err == f"{TOLD}{TOLD}{told}"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 4), (FedemuError("it could not be served"), 5)])
def test_a_page_that_does_not_start_leaves_no_run_directory(
    error: BaseException, code: int, started: list[Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(directory: Path) -> None:
        assert directory.is_dir()
        raise error

    monkeypatch.setattr(opening, "start_page", fails)
    for command in ("run", "coordinator"):
        with pytest.raises(SystemExit) as ended:
            commands.command([command, "digits-small", "--page", "--out", str(tmp_path / "new")], prog_name="fedemu")
        assert (ended.value.code, started, list(tmp_path.iterdir())) == (code, [], [])


@pytest.mark.parametrize("named", [("--on", "ray"), ("--set", "runtime.on=ray")])
@pytest.mark.parametrize("several", [False, True])
def test_a_run_on_an_engine_waits_long_also_if_a_setting_names_the_engine(
    several: bool, named: Sequence[str], started: list[Runtime], tmp_path: Path
) -> None:
    words = ["run", "digits-small", *named, "--set", "fleet.start_timeout=30", "--out", str(tmp_path / "new")]
    with pytest.raises(SystemExit):
        commands.command([*words, *(["--seeds", "3"] if several else [])], prog_name="fedemu")
    assert [(runtime.connect_seconds, runtime.lost_seconds) for runtime in started] == [(600, 600)]
    fleet = read_frozen(tmp_path / "new" / "seed-3" if several else tmp_path / "new").fleet
    assert (fleet.start_timeout, fleet.give_up) == (30, 600)


@pytest.mark.parametrize("several", [(), ("--seeds", "3")])
def test_a_run_whose_devices_ray_places_needs_no_gpu_on_the_machine_of_its_coordinator(
    several: Sequence[str], started: list[Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "cuda_here", lambda: None)
    out = str(tmp_path / "new")
    for where in ("--out", "--resume"):
        words = ["digits-small"] if where == "--out" else []
        with pytest.raises(SystemExit):
            commands.command(
                ["run", *words, *several, "--on", "ray", "--device-type", "cuda", where, out], prog_name="fedemu"
            )
    assert [(runtime.on, runtime.device_type) for runtime in started] == [("ray", "cuda")] * 2


@pytest.mark.parametrize("named", [("--on", "ray"), ("--set", "runtime.on=ray")])
@pytest.mark.parametrize("several", [(), ("--seeds", "3")])
def test_a_run_whose_devices_ray_places_has_no_edges(
    several: Sequence[str],
    named: Sequence[str],
    started: list[Runtime],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["run", "digits-small", *named, *several, "--set", "tree.edges=2", "--out", str(tmp_path / "new")]
    with pytest.raises(SystemExit) as ended:
        commands.command(words, prog_name="fedemu")
    assert (ended.value.code, started, list(tmp_path.iterdir())) == (2, [], [])
    assert "--on ray starts no edges, and tree.edges asks for them; add --set tree.edges=0" in capsys.readouterr().err
