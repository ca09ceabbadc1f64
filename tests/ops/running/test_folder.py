"""A run directory is claimed, reopened and given back."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fedemu.coordinator.fleet.journal import LEASES, LeaseJournal
from fedemu.coordinator.record.records import write_record
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.run_directory import RunDirectory, frozen_files
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.running.codes import USAGE
from fedemu.ops.running.coordinator import coordinate_alone
from fedemu.ops.running.folder import (
    PLACES,
    claim,
    give_back,
    keep_grown,
    naming_version,
    reopen,
    require_own_states,
    take_back_growth,
)
from fedemu.ops.running.timing import timing
from fedemu.ops.running.together import run_together
from fedemu.protocol.errors import ConfigurationError, DataError, FedemuError

EXPERIMENT = Experiment(name="tiny", rounds=3)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write_row(directory: Path, round: int) -> None:
    with RunDirectory(directory) as run:
        run.metrics(Row(round=round, accuracy=0.5, accepted=5))


def test_a_claimed_directory_holds_the_experiment_and_can_be_resumed() -> None:
    directory = claim(EXPERIMENT, Path("deep/new"))
    assert read_frozen(directory) == EXPERIMENT
    with RunDirectory(directory) as run:
        assert run.rows() == ()


def test_a_full_disk_is_one_sentence_and_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FedemuError, match=r"config\.toml cannot be written: the disk is full; .*--out") as told:
        claim(EXPERIMENT, Path("new"))
    assert told.value.exit_code == 5
    assert not Path("new").exists()


def test_an_interrupted_claim_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: str, target: str) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        claim(EXPERIMENT, Path("new"))
    assert not Path("new").exists()


def test_runs_without_a_name_are_numbered() -> None:
    assert [claim(EXPERIMENT, None) for _ in range(2)] == [Path("runs/tiny-1"), Path("runs/tiny-2")]


def test_a_run_directory_is_claimed_only_once() -> None:
    claim(EXPERIMENT, Path("mine"))
    with pytest.raises(ConfigurationError, match=r"mine exists and is not empty; choose another .*, or continue"):
        claim(EXPERIMENT, Path("mine"))


def test_a_claim_without_a_round_is_given_back() -> None:
    directory = claim(EXPERIMENT, None)
    (directory / "logs").mkdir()
    assert give_back(directory)
    assert not Path("runs").exists()


def test_a_claim_beside_another_run_is_given_back_alone() -> None:
    kept, directory = claim(EXPERIMENT, None), claim(EXPERIMENT, None)
    assert give_back(directory)
    assert list(Path("runs").iterdir()) == [kept]


def test_a_claim_in_which_devices_have_enrolled_and_no_round_was_played_is_given_back() -> None:
    directory = claim(EXPERIMENT, Path("mine"))
    (directory / "checkpoint").mkdir()
    LeaseJournal(directory / "checkpoint" / LEASES).write({"grant": "a"})
    (directory / "devices").mkdir()
    assert give_back(directory)
    assert not directory.exists()


@pytest.mark.parametrize("name", ["record-1.json", "job-1.1.0.20.safetensors"])
def test_a_run_with_a_checkpoint_is_kept(name: str) -> None:
    directory = claim(EXPERIMENT, None)
    (directory / "checkpoint").mkdir()
    (directory / "checkpoint" / name).touch()
    assert not give_back(directory)
    assert directory.exists()


def test_a_claim_that_cannot_be_seen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = claim(EXPERIMENT, None)
    (directory / "checkpoint").mkdir()

    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert not give_back(directory)
    assert directory.exists()


def test_a_run_with_a_round_is_kept() -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    assert not give_back(directory)
    assert len(read_run(directory).rows) == 1


def test_a_run_may_grow_when_it_is_reopened_and_the_frozen_file_grows_with_it() -> None:
    directory = claim(EXPERIMENT, None)
    experiment, _ = reopen(directory, ["rounds=5"], {})
    assert (experiment.rounds, read_frozen(directory).rounds) == (5, 3)
    keep_grown(directory, experiment)
    assert read_frozen(directory).rounds == 5


@pytest.mark.parametrize(("played", "rounds"), [(3, 3), (4, 5)])
def test_a_run_gives_its_further_rounds_back_if_none_of_them_was_played(played: int, rounds: int) -> None:
    directory = claim(EXPERIMENT, None)
    keep_grown(directory, reopen(directory, ["rounds=5"], {})[0])
    for round in range(1, played + 1):
        write_row(directory, round)
    take_back_growth()
    assert read_frozen(directory).rounds == rounds


def test_a_run_whose_rows_are_damaged_gives_its_further_rounds_back() -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    with Path(directory, "metrics.jsonl").open("a") as rows:
        rows.write("damaged\n")
    keep_grown(directory, reopen(directory, ["rounds=5"], {})[0])
    take_back_growth()
    assert read_frozen(directory) == EXPERIMENT


@contextmanager
def at_work_in(directory: Path) -> Iterator[int]:
    """Another process holds the lock of the run meanwhile: the one whose id is given."""
    lock = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX)"
    holds = f"{lock}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(directory / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield other.pid


def test_a_run_does_not_grow_while_a_coordinator_is_at_work_in_it() -> None:
    directory = claim(EXPERIMENT, None)
    experiment, _ = reopen(directory, ["rounds=5"], {})
    with at_work_in(directory):
        with pytest.raises(ConfigurationError, match=r"Another coordinator \(process \d+\) is at work"):
            keep_grown(directory, experiment)
        assert read_frozen(directory).rounds == 3
        keep_grown(directory, EXPERIMENT)


@pytest.mark.parametrize("alone", [False, True])
def test_a_second_command_changes_nothing_in_a_run_that_goes_on(
    alone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = claim(EXPERIMENT, None)
    with timing(directory, wanted=True):
        pass
    before = {file: file.read_bytes() for file in directory.iterdir()}
    runtime = Runtime.model_validate({"track": {"to": "tensorboard"}})
    with at_work_in(directory) as other:
        if alone:
            code = coordinate_alone(directory, EXPERIMENT, runtime, new=False, print_summary=False)
        else:
            code = run_together(directory, EXPERIMENT, runtime, new=False, print_summary=False, timed=True)
    said = capsys.readouterr().err
    assert (code, said) == (
        USAGE,
        f"fedemu: Another coordinator (process {other}) is at work in {directory}; stop it, or wait until it ends\n",
    )
    assert {file: file.read_bytes() for file in directory.iterdir()} == before | {directory / ".lock": b""}


def test_a_run_cannot_become_another_one() -> None:
    directory = claim(EXPERIMENT, None)
    with pytest.raises(ConfigurationError, match=r"local\.lr can't change"):
        reopen(directory, ["local.lr=0.5"], {})
    assert read_frozen(directory) == EXPERIMENT


def played(directory: Path, version: str = "") -> Path:
    """A run with a checkpoint, as its coordinator leaves it."""
    record: dict[str, Any] = {"frozen": frozen_files(directory)}
    if version:
        record["compute"] = {"coordinator": [{"host": "a", "fedemu": version}, {"host": "a", "fedemu": "3"}]}
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    write_record(checkpoint, 2, {"format": 2, "record": record})
    return directory / "config.toml"


def test_an_experiment_that_was_changed_by_hand_is_not_gone_on_with() -> None:
    config = played(directory := claim(EXPERIMENT, None))
    config.write_text(config.read_text().replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(ConfigurationError, match=r"changed since the run began: local\.lr is 0\.2, and it was 0\.1"):
        reopen(directory, [], {})


def test_a_run_whose_traces_are_gone_or_were_changed_is_not_gone_on_with() -> None:
    traces = (directory := claim(EXPERIMENT, None)) / "traces.json"
    traces.write_text("{}")
    played(directory)
    assert reopen(directory, [], {})[0] == EXPERIMENT
    refusal = r"traces\.json is gone or was changed since the run began; put it back"
    traces.write_text("[]")
    with pytest.raises(ConfigurationError, match=refusal):
        reopen(directory, [], {})
    traces.unlink()
    with pytest.raises(ConfigurationError, match=refusal):
        reopen(directory, [], {})


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_an_experiment_that_was_cut_is_not_gone_on_with(share: float) -> None:
    config = played(directory := claim(EXPERIMENT, None))
    text = config.read_text()
    config.write_text(text[: int(share * len(text))])
    with pytest.raises(ConfigurationError, match="remove it and resume: then it is written back from the checkpoint"):
        reopen(directory, [], {})


@pytest.mark.parametrize(
    ("version", "named"),
    [("", "another version"), (metadata.version("fedemu"), "another version"), ("0.0.3", "version 0.0.3")],
)
def test_settings_of_another_version_name_that_version_and_no_mistyped_setting(version: str, named: str) -> None:
    directory = claim(EXPERIMENT, None)
    config = directory / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.1", 'lr = 0.1\ncolour = "red"'))
    with pytest.raises(ConfigurationError, match=r"^local\.colour is no setting"):
        reopen(directory, [], {})
    played(directory, version)
    said = rf"^{named} of fedemu began the run in runs/tiny-1, .* with that version: local\.colour is no setting"
    with pytest.raises(ConfigurationError, match=said):
        reopen(directory, [], {})


def test_what_is_refused_when_a_run_of_another_version_is_put_together_names_that_version() -> None:
    directory = claim(EXPERIMENT, None)

    def refusal() -> str:
        with pytest.raises(ConfigurationError) as caught, naming_version(directory):
            raise DataError("mu = 1e+39 does not fit")
        return str(caught.value)

    assert refusal() == "mu = 1e+39 does not fit"
    (directory / "summary.json").write_text('{"versions": {"fedemu": "0.0.2"}}')
    assert refusal().startswith(
        "mu = 1e+39 does not fit; version 0.0.2 of fedemu began the run in runs/tiny-1, and this"
    )
    played(directory, "0.0.3")
    assert refusal() == (
        "mu = 1e+39 does not fit; version 0.0.3 of fedemu began the run in runs/tiny-1, and this is version "
        f"{metadata.version('fedemu')}: if that one took it, go on with it"
    )


@pytest.mark.parametrize("summary", ["{", "[]", '{"versions": 3}', "{}"])
def test_a_summary_that_tells_no_version_changes_nothing_of_a_refusal(summary: str) -> None:
    directory = claim(EXPERIMENT, None)
    (directory / "summary.json").write_text(summary)
    with pytest.raises(ConfigurationError, match=r"^wrong$"), naming_version(directory):
        raise ConfigurationError("wrong")


def test_an_experiment_that_is_gone_is_written_back(capsys: pytest.CaptureFixture[str]) -> None:
    config = played(directory := claim(EXPERIMENT, None))
    text = config.read_text()
    config.unlink()
    assert reopen(directory, [], {})[0] == EXPERIMENT
    assert config.read_text() == text
    assert capsys.readouterr().err == f"{config} was gone; it is written back from the checkpoint\n"


def test_a_run_that_has_grown_may_be_reopened_again() -> None:
    played(directory := claim(EXPERIMENT, None))
    keep_grown(directory, reopen(directory, ["rounds=5"], {})[0])
    assert reopen(directory, [], {})[0].rounds == 5


@pytest.mark.parametrize(("count", "now", "other"), [(20, "zmq", "memory"), (10, "memory", "zmq")])
def test_own_states_at_other_machines_are_not_lost_by_another_transport(count: int, now: str, other: str) -> None:
    experiment = Experiment.model_validate(
        {"name": "tiny", "fleet": {"devices": 20, "per_round": 5}, "tree": {"edges": 2}}
    )
    directory = claim(experiment, Path("run"))
    lease = directory / "devices" / "tiny" / "0123"
    (lease / "devices" / "7").mkdir(parents=True)
    (lease / "lease.json").write_text(f'{{"lease": "L", "run": "tiny", "count": {count}, "life": 1}}')
    there, elsewhere = (Runtime.model_validate({"transport": transport}) for transport in (now, other))
    require_own_states(directory, experiment, there)  # no device has a state of its own
    (lease / "devices" / "7" / "own-1.0.0.safetensors").touch()
    require_own_states(directory, experiment, elsewhere)
    require_own_states(directory, experiment.model_copy(update={"tree": EXPERIMENT.tree}), there)
    with pytest.raises(ConfigurationError, match=f"because of tree.edges; go on with --transport {other}"):
        require_own_states(directory, experiment, there)
    with pytest.raises(ConfigurationError, match="have states of their own here; go on without --on"):
        require_own_states(directory, EXPERIMENT, Runtime(on="ray"))


def test_own_states_at_the_places_of_an_engine_are_not_lost_without_it() -> None:
    directory = claim(EXPERIMENT, Path("run"))
    (directory / PLACES).write_text('{"0": {"test/0123/lease.json": "{}"}}')
    (directory / "checkpoint").mkdir()
    require_own_states(directory, EXPERIMENT, Runtime())  # no round was played
    for states in ({}, {"1.0.0": [4, 2]}):
        write_record(directory / "checkpoint", len(states), {"record": {"roster": {"states": states}}})
        require_own_states(directory, EXPERIMENT, Runtime(on="ray"))
        if not states:
            require_own_states(directory, EXPERIMENT, Runtime())
    for runtime in (Runtime(), Runtime(transport="memory")):
        with pytest.raises(ConfigurationError, match=r"have states of their own at the nodes .* go on with --on ray"):
            require_own_states(directory, EXPERIMENT, runtime)
    (directory / PLACES).unlink()
    require_own_states(directory, EXPERIMENT, Runtime())


def test_a_run_goes_on_at_as_many_places_as_an_engine_has_divided_its_devices_among() -> None:
    directory = claim(EXPERIMENT, Path("run"))
    require_own_states(directory, EXPERIMENT, Runtime(on="ray", nodes=3))
    (directory / PLACES).write_text('{"0": {}, "1": {"test/0123/lease.json": "{}"}}')
    for nodes in (0, 2):
        require_own_states(directory, EXPERIMENT, Runtime(on="ray", nodes=nodes))
    with pytest.raises(ConfigurationError, match="divided among 2 places, which keep their own states; go on with --"):
        require_own_states(directory, EXPERIMENT, Runtime(on="ray", nodes=3))
    (directory / PLACES).write_text('{"0": {}')
    with pytest.raises(ConfigurationError, match=r"places\.json cannot be read: .*; mend the file"):
        require_own_states(directory, EXPERIMENT, Runtime(on="ray"))
