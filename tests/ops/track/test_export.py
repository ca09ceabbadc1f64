"""What trackers are told of a run: everything, and nothing twice, as their own readers read it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from PIL import Image

from fedemu.coordinator.record.row import Row
from fedemu.ops.cli import commands
from fedemu.ops.experiment import Experiment
from fedemu.ops.track.export import Export, export
from fedemu.ops.track.kinds import check, places
from fedemu.ops.track.numbers import numbers_of
from fedemu.ops.track.wandb_file import read, records
from fedemu.protocol.errors import ConfigurationError, FedemuError

OWN = """
import json
from pathlib import Path


class Mine:
    def begin(self, run):
        Path(run.out).mkdir(exist_ok=True)
        self.file = Path(run.out) / "told.jsonl"
        self.say(begin=run.told, memory=run.memory, name=run.name, digest=run.digest, lr=run.parameters["local.lr"])
        return {"times": run.memory.get("times", 0) + 1}

    def say(self, **told):
        with self.file.open("a") as file:
            file.write(json.dumps(told) + "\\n")

    def row(self, row, numbers):
        self.say(round=row.round, accuracy=numbers["accuracy"])

    def flush(self):
        pass

    def ended(self, end):
        self.say(outcome=end.summary["outcome"], figures=[file.name for file in end.figures], model=end.model.name)

    def close(self):
        self.say(close=True)


class Full(Mine):
    def row(self, row, numbers):
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("it did not work") from error


class Broken(Mine):
    def row(self, row, numbers):
        raise ValueError("no room")


class Stopped(Mine):
    def row(self, row, numbers):
        if row.round == 2 and not self.file.with_name("stopped").exists():
            self.file.with_name("stopped").touch()
            raise KeyboardInterrupt
        super().row(row, numbers)


class Away(Mine):
    def row(self, row, numbers):
        if row.round == 5 and not self.file.with_name("away").exists():
            self.file.with_name("away").touch()
            raise ConnectionError("the server is away")
        super().row(row, numbers)


class Forgetful(Mine):
    def begin(self, run):
        return [1]


class Strange(Mine):
    def begin(self, run):
        return {"seen": {1, 2}}
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return f"{tmp_path / 'mine.py'}:Mine"


def told(place: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(place) / "told.jsonl").read_text().splitlines()]


def test_a_tracker_of_ones_own_is_told_everything_once_however_often_the_run_goes_on(
    run: Path, own: str, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    digest = Experiment.parse({"name": "tiny", "rounds": 2, "local": {"lr": 0.25}}).digest
    begin = {"name": "run-7", "digest": digest, "lr": 0.25}
    out = export(run, own)
    add_rows(run, 3, 3)
    finish(run, 3)
    moved = run.parent / "elsewhere" / run.name
    shutil.move(run, moved)
    out = out.replace(str(run), str(moved))
    assert export(moved, own) == out
    export(moved, own)
    assert told(out) == [
        {"begin": 0, "memory": {}, **begin},
        {"round": 1, "accuracy": 0.1},
        {"round": 2, "accuracy": 0.2},
        {"close": True},
        {"begin": 2, "memory": {"times": 1}, **begin},
        {"round": 3, "accuracy": 0.3},
        {"outcome": "completed", "figures": ["accuracy.png"], "model": "model.safetensors"},
        {"close": True},
        {"begin": 3, "memory": {"times": 2}, **begin},
        {"close": True},
    ]


def test_an_interrupted_run_is_told_as_ended_and_again_when_it_has_gone_on(
    run: Path, own: str, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    finish(run, 2, "interrupted")
    out = export(run, own)
    (run / "summary.json").unlink()  # so does the run when it goes on
    add_rows(run, 3, 3)
    export(run, own)  # it was killed
    finish(run, 3)
    export(run, own)
    lines = [(line.get("begin"), line.get("round"), line.get("outcome")) for line in told(out) if "close" not in line]
    assert lines == [
        (0, None, None),
        (None, 1, None),
        (None, 2, None),
        (None, None, "interrupted"),
        (2, None, None),
        (None, 3, None),
        (3, None, None),
        (None, None, "completed"),
    ]


def test_a_completed_run_that_is_to_get_more_rounds_is_told_as_interrupted_until_it_has_them(
    run: Path, own: str, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    finish(run, 2)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("\nrounds = 2\n", "\nrounds = 3\n"))
    export(run, own)
    export(run, own)
    add_rows(run, 3, 3)
    finish(run, 3)
    out = export(run, own)
    lines = [line.get("round") or line.get("outcome") for line in told(out)]
    assert [line for line in lines if line] == [1, 2, "interrupted", 3, "completed"]


def test_what_was_told_before_an_interrupt_or_a_failure_is_not_told_again(
    run: Path, own: str, add_rows: Callable[..., None]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(run, own.replace("Mine", "Stopped"))
    out = export(run, own.replace("Mine", "Stopped"))
    assert [line["round"] for line in told(out) if "round" in line] == [1, 2]
    add_rows(run, 3, 5)
    with pytest.raises(ConfigurationError, match="the server is away"):
        export(run, own.replace("Mine", "Away"))
    out = export(run, own.replace("Mine", "Away"))
    assert [line["round"] for line in told(out) if "round" in line] == [1, 2, 3, 4, 5]


def test_a_tracker_that_was_killed_is_told_no_row_twice_apart_from_that_in_its_hands(
    run: Path, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = Export(run, own)
    kept: list[int] = []

    def row(row: Row, numbers: dict[str, float]) -> None:
        (state,) = (run / "track").glob("*.json")
        kept.append(json.loads(state.read_bytes())[killed._place]["told"])

    monkeypatch.setattr(killed._tracker, "row", row)
    killed.more()
    killed.close()
    assert kept == [0, 1], "what a killed process leaves while it tells the rounds 1 and 2"


def test_a_run_that_ends_while_its_rows_are_told_is_told_its_last_rows_before_its_end(
    run: Path, own: str, monkeypatch: pytest.MonkeyPatch, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    slow = Export(run, own)
    row = slow._tracker.row

    def end_meanwhile(told: Row, numbers: dict[str, float]) -> None:
        row(told, numbers)
        if told.round == 2:
            add_rows(run, 3, 4)
            finish(run, 4)

    monkeypatch.setattr(slow._tracker, "row", end_meanwhile)
    slow.end()
    slow.close()
    lines = [line.get("round") or line.get("outcome") for line in told(slow.out)]
    assert [line for line in lines if line] == [1, 2, 3, 4, "completed"]


def test_the_end_is_told_again_after_rows_that_came_after_it(
    run: Path, own: str, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    finish(run, 4)
    export(run, own)
    add_rows(run, 3, 4)
    out = export(run, own)
    lines = [line.get("round") or line.get("outcome") for line in told(out)]
    assert [line for line in lines if line] == [1, 2, "completed", 3, 4, "completed"]


def test_each_place_is_told_by_itself_and_again_when_it_was_removed(run: Path, own: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    for out in (first, second):
        assert export(run, own, out) == out
        assert sum("round" in line for line in told(out)) == 2
    (Path(first) / "told.jsonl").unlink()
    Path(first).rmdir()
    export(run, own, first)
    assert sum("round" in line for line in told(first)) == 2


def test_a_copy_of_a_run_is_another_run_at_a_place_outside_and_a_run_that_was_moved_is_the_same(
    run: Path, own: str, tmp_path: Path, add_rows: Callable[..., None]
) -> None:
    out = str(tmp_path / "outside")
    export(run, own, out)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    add_rows(copy, 3, 3)
    export(copy, own, out)
    export(copy, own, out)
    shutil.move(run, tmp_path / "moved")
    export(tmp_path / "moved", own, out)
    begins = [(line["name"], line["begin"]) for line in told(out) if "begin" in line]
    assert begins == [("run-7", 0), ("copy", 0), ("copy", 3), ("moved", 2)]


def test_what_was_told_at_an_address_is_kept_without_its_password_and_goes_on_with_what_was_kept_with_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    silent = MagicMock(**{"return_value.begin.return_value": None})
    silent.return_value.row.side_effect = lambda row, numbers: rounds.append(row.round)
    monkeypatch.setattr("fedemu.ops.track.export.tracker", lambda name: silent())
    address = "https://alice:s3cret@tracks.example"
    state = run / "track" / "Mine.json"
    state.parent.mkdir()
    state.write_text(json.dumps({address: {"told": 1}}))
    for _ in range(2):
        export(run, "Mine", address)
    assert rounds == [2]
    assert [*json.loads(state.read_text())] == ["https://alice:...@tracks.example"]


def test_several_trackers_with_one_place_each_have_a_folder_of_their_own_there(
    run: Path, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.py").write_text(OWN)
    names, out = (own, f"{tmp_path / 'other.py'}:Mine"), tmp_path / "new" / "out"
    words = ["export", str(run), *(word for name in names for word in ("--to", name))]
    with pytest.raises(SystemExit) as ended:
        commands.command([*words, "--out", str(out)], prog_name="fedemu")
    assert ended.value.code == 0
    told_at = capsys.readouterr().out.split()
    assert len(told_at) == len(set(told_at)) == 2
    assert {Path(place).parent for place in told_at} == {out}
    assert [sum("round" in line for line in told(place)) for place in told_at] == [2, 2]
    assert [*places(names, str(out)).values()] == told_at
    assert places(["mlflow"], "http://there") == {"mlflow": "http://there"}
    assert places(["mlflow"], "~/there") == {"mlflow": str(Path.home() / "there")}
    assert places(["mlflow"], "there/../here") == {"mlflow": str(Path.cwd() / "here")}
    with pytest.raises(ConfigurationError, match="http://there is the address of one tracker, and 2 are named; name"):
        check(["mlflow", own], "http://there")


def test_a_place_that_is_told_while_another_one_is_followed_is_told_nothing_twice(
    run: Path, own: str, tmp_path: Path
) -> None:
    following = Export(run, own, str(tmp_path / "followed"))
    out = export(run, own, str(tmp_path / "exported"))
    following.more()
    with pytest.raises(ConfigurationError, match=r"Mine is told of .*run-7 by another process just now; wait until it"):
        export(run, own, str(tmp_path / "followed"))
    following.close()
    for place in (out, str(tmp_path / "followed")):
        export(run, own, place)
        assert sum("round" in line for line in told(place)) == 2


def test_a_tracker_that_fails_is_told_in_one_sentence(run: Path, own: str) -> None:
    with pytest.raises(ConfigurationError, match=r"failed: ValueError: no room, .*mine\.py:\d+\n +.* in row: raise"):
        export(run, own.replace("Mine", "Broken"))


@pytest.mark.parametrize(
    ("name", "problem"), [("Forgetful", "it is a list"), ("Strange", "Object of type set is not JSON serializable")]
)
def test_a_tracker_whose_memory_cannot_be_kept_is_told_what_to_return(
    name: str, problem: str, run: Path, own: str
) -> None:
    said = rf"what begin of .*{name} returns cannot be kept as JSON \({problem}\); return a dict"
    with pytest.raises(ConfigurationError, match=said):
        export(run, own.replace("Mine", name))


@pytest.mark.skipif(not find_spec("tensorboardX"), reason="the extra tensorboard is not installed")
def test_a_place_where_a_tracker_cannot_write_is_named(run: Path) -> None:
    place = run / "model.safetensors"
    with pytest.raises(
        ConfigurationError, match=r"tensorboard failed: .*tensors/run-7 can't be used: Not a directory$"
    ):
        export(run, "tensorboard", str(place))


def test_a_tracker_that_fails_by_a_full_disk_is_no_mistake_of_the_user(run: Path, own: str) -> None:
    with pytest.raises(FedemuError, match=r"Full failed, because its folder .* the disk is full; make room") as told:
        export(run, own.replace("Mine", "Full"))
    assert told.value.exit_code == 5


def test_names_that_are_no_trackers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match='no tracker "tensorbord"; choose from tensorboard, mlflow, wandb'):
        check(["tensorbord"])
    with pytest.raises(ConfigurationError, match="nowhere"):
        check(["nowhere_at_all:Mine"])
    folder = ModuleSpec("mlflow", None, is_package=True)  # of this name, with no package in it
    for absent in (None, folder):
        monkeypatch.setattr("fedemu.ops.extras.find_spec", lambda name, found=absent: found)
        with pytest.raises(
            ConfigurationError, match=r"needs the package mlflow; install it with pip install 'fedemu\[mlflow"
        ):
            check(["mlflow"])
    with pytest.raises(ConfigurationError, match="holds no run"):
        export(tmp_path, "x.py:Mine")


def test_the_numbers_of_a_row_have_names_and_what_was_not_measured_is_left_out() -> None:
    row = Row(
        3, accuracy=0.5, class_accuracy=(0.25, None), device_metrics={"loss": 1.0}, remarks={"a": {"b": 2, "c": "d"}}
    )
    assert numbers_of(row) == {
        "accuracy": 0.5,
        "class_accuracy/0": 0.25,
        "device_metrics/loss": 1.0,
        "remarks/a/b": 2.0,
    }


@pytest.mark.timeout(600)  # their packages take long to import on a busy machine
@pytest.mark.skipif(not find_spec("tensorboard"), reason="tensorboard, which reads its files, is not installed")
@pytest.mark.skipif(not find_spec("tensorboardX"), reason="the extra tensorboard is not installed")
def test_tensorboard_reads_a_run_that_was_killed_and_went_on_without_doubles(
    run: Path, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed = Export(run, "tensorboard")
    killed._tracker.row(Row(1, accuracy=0.1), {"accuracy": 0.1})  # killed before any round was noted
    killed.close()
    killed = Export(run, "tensorboard")
    killed.more()
    # It was killed after it had written a round, and before it had noted that.
    killed._tracker.row(Row(3, accuracy=0.3), {"accuracy": 0.3, "device_metrics/own loss": 1.5})
    killed.close()
    add_rows(run, 3, 3)
    row = {"round": 4, "accuracy": 0.4, "device_metrics": {"own loss": 1.25, "own_loss": 2.5}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    finish(run, 4)
    out = export(run, "tensorboard")
    read = EventAccumulator(str(Path(out) / "run-7"))
    read.Reload()
    assert [event.value for event in read.Scalars("device_metrics/own loss")] == [1.25]
    assert [event.value for event in read.Scalars("device_metrics/own_loss")] == [2.5]
    assert [(event.step, round(event.value, 6)) for event in read.Scalars("accuracy")] == [
        *((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4))
    ]
    assert "class_accuracy/0" in read.Tags()["scalars"]
    (image,) = read.Images("figures/accuracy")
    assert (image.width, image.height) == (4, 3)
    assert {"settings/text_summary", "experiment digest/text_summary", "model digest/text_summary"} <= {
        *read.Tags()["tensors"]
    }
    shutil.rmtree(Path(out) / "run-7")  # somebody tidies a folder of several runs
    export(run, "tensorboard")
    read = EventAccumulator(str(Path(out) / "run-7"))
    read.Reload()
    assert [event.step for event in read.Scalars("accuracy")] == [1, 2, 3, 4]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("tensorboardX"), reason="the extra tensorboard is not installed")
@pytest.mark.parametrize(("size", "left"), [(100, []), (4000, ["run-7"])], ids=["begin", "ended"])
def test_a_disk_that_is_full_for_tensorboard_is_told_and_the_next_attempt_takes_the_same_folder(
    run: Path,
    capfd: pytest.CaptureFixture[str],
    size: int,
    left: list[str],
    files_end_at: Any,
    finish: Callable[..., None],
) -> None:
    Image.effect_noise((100, 100), 50).save(run / "plots" / "accuracy.png")
    finish(run, 2)
    out = run / "track" / "tensorboard"
    refused = pytest.raises(FedemuError, match=r"tensorboard failed, because its folder .*: File too large")
    with files_end_at(size), refused:
        export(run, "tensorboard")
    assert capfd.readouterr().err == ""
    assert [folder.name for folder in out.iterdir()] == left
    export(run, "tensorboard")
    assert [folder.name for folder in out.iterdir()] == ["run-7"]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("tensorboardX"), reason="the extra tensorboard is not installed")
def test_tensorboard_keeps_runs_apart_whose_directories_are_called_alike(
    run: Path, tmp_path: Path, add_rows: Callable[..., None]
) -> None:
    out, other = tmp_path / "out", tmp_path / "lr=0.1" / run.name
    shutil.copytree(run, other)
    for rounds in (3, 4):
        for directory in (run, other):
            add_rows(directory, rounds, rounds)
            export(directory, "tensorboard", str(out))
    assert sorted(folder.name for folder in out.iterdir()) == sorted([run.name, f"lr=0.1-{run.name}"])
    shutil.rmtree(out)
    export(other, "tensorboard", str(out))
    assert [folder.name for folder in out.iterdir()] == [run.name]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("completed", 0), ("diverged", 0), ("interrupted", 1), ("quorum", 1), ("failed", 1), (None, 1)],
)
def test_weights_and_biases_is_told_how_a_run_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch, outcome: str | None, code: int, finish: Callable[..., None]
) -> None:
    fake = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("fedemu.ops.extras.find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    if outcome is not None:
        finish(run, 2, outcome)
    export(run, "wandb")
    export(run, "wandb")  # nothing is new, so the run stays as it ended
    fake.init.return_value.finish.assert_called_once_with(exit_code=code)


def test_weights_and_biases_names_no_two_folders_alike_though_names_have_whole_seconds(
    run: Path, monkeypatch: pytest.MonkeyPatch, add_rows: Callable[..., None]
) -> None:
    clock, names = [0.0], []

    def init(**settings: Any) -> MagicMock:  # as version 0.20 to 0.22 name it
        name = f"offline-run-{time.strftime('%S', time.gmtime(clock[0]))}-{settings['id']}"
        (Path(settings["dir"]) / "wandb" / name).mkdir(parents=True, exist_ok=True)
        names.append(name)
        return MagicMock()

    monkeypatch.setitem(sys.modules, "wandb", MagicMock(init=init))
    monkeypatch.setattr("fedemu.ops.extras.find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    stand_in = MagicMock(
        strftime=lambda form: time.strftime("%S", time.gmtime(clock[0])),
        sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds),
    )
    monkeypatch.setattr("fedemu.ops.track.wandb.time", stand_in)
    for round in (3, 4):
        export(run, "wandb")
        add_rows(run, round, round)
    assert names[0].rpartition("-")[2] == names[1].rpartition("-")[2]
    assert len({*names}) == 2


@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("wandb"), reason="the extra wandb is not installed")
def test_weights_and_biases_gets_a_run_that_went_on_under_the_same_id_and_writes_nowhere_else(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    add_rows: Callable[..., None],
    finish: Callable[..., None],
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    export(run, "wandb")
    add_rows(run, 3, 3)
    finish(run, 3)
    out = export(run, "wandb")
    files = list(Path(out).glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 1
    assert all(b"class_accuracy/0" in file.read_bytes() for file in files)
    assert [file.read_bytes() for file in Path(out).glob("artifacts/staging/*")] == [b"model"]
    assert not (tmp_path / "home").exists()


@pytest.mark.timeout(600)
@pytest.mark.skipif(not find_spec("wandb"), reason="the extra wandb is not installed")
def test_weights_and_biases_has_every_round_and_the_end_once_though_it_was_killed_twice(
    run: Path, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    add_rows(run, 3, 500)
    _kill_while_it_is_told(run, written=2**15)
    (killed,) = (run / "track" / "wandb").glob("wandb/offline-run-*/*.wandb")
    there, closed = read(killed)
    assert 2 < there < 500
    assert not closed
    add_rows(run, 501, 501)
    finish(run, 501)
    _kill_while_it_is_told(run, written=0)
    out = export(run, "wandb")
    export(run, "wandb")
    files = sorted(Path(out).glob("wandb/offline-run-*/*.wandb"))
    protocol = import_module("wandb.proto.wandb_internal_pb2")
    told = [[protocol.Record.FromString(record) for record in records(file.read_bytes())] for file in files]
    steps = [record.history.step.num for part in told for record in part if record.HasField("history")]
    assert steps == [*range(1, 502)]
    assert [sum(record.HasField("exit") for record in part) for part in told] == [0, 0, 1]
    assert [record.exit.exit_code for record in told[-1] if record.HasField("exit")] == [0]
    assert len({file.stem for file in files}) == 1


def _kill_while_it_is_told(run: Path, written: int) -> None:
    """Tell Weights & Biases of a run, and leave what is there once so many bytes are written, as if it was killed."""
    telling = Export(run, "wandb")
    telling.end()
    *_, file = sorted((run / "track" / "wandb").glob("wandb/offline-run-*/*.wandb"))
    while file.stat().st_size < written:
        time.sleep(0.01)
    shutil.copytree(run / "track", run / "left", symlinks=True)
    telling.close()
    shutil.rmtree(run / "track")
    (run / "left").rename(run / "track")
