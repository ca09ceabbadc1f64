"""``fedemu presets`` and ``fedemu init``: what they print and write."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.cli import commands
from fedemu.ops.data.corpora import source_of
from fedemu.ops.data.source import entry_of, locate
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.presets import example_of, part_names, part_table, preset, preset_names
from fedemu.ops.experiment.printed import printed
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.experiment.starter import starter_text


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        commands.command(list(arguments), prog_name="fedemu")
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("FEDEMU_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_presets_are_listed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("presets") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("digits ")
    assert shown.index("\nfedntd-mnist-shards2 ") < shown.index("\nMethods. ") < shown.index("\nscaffold ")
    assert call("presets", "--format", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["name"] == "digits"
    assert {entry["kind"] for entry in listed if entry["name"] in ("digits-small", "churn")} == {"experiment"}
    assert {entry["kind"] for entry in listed if entry["name"] in ("scaffold", "wsm")} == {"method"}


def test_the_list_tells_which_data_are_here_and_where_it_looked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call("presets")
    shown = capsys.readouterr().out
    assert "Data at hand: digits. Looked in: this folder; FEDEMU_DATA is not set; decoded data in " in shown
    assert shown.index("\nchurn ") < shown.index("Not here: ") < shown.index("\nmnist-cnn ") < shown.index("\nphones ")
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    experiment = Experiment.parse(preset("cifar10-cnn"))
    source = source_of(experiment.data, experiment.stream)
    of_the_hub = entry_of(source, locate("cifar10", None), tmp_path / "cache")
    for decoded in (of_the_hub, of_the_hub.with_name("cinic10-0123")):  # the second one comes from somewhere else
        decoded.mkdir(parents=True)
        (decoded / "meta.json").touch()
    (tmp_path / "hub" / "hub" / "datasets--cifar100").mkdir(parents=True)
    monkeypatch.setenv("FEDEMU_DATA", str(tmp_path / "data"))
    call("presets")
    shown = capsys.readouterr().out
    assert f"FEDEMU_DATA = {tmp_path / 'data'};" in shown
    assert f"; the data of the Hugging Face hub in {tmp_path / 'hub' / 'hub'}.\n" in shown
    at_hand = shown.partition("Data at hand: ")[2].partition(". Looked")[0]
    assert {*at_hand.split(", ")} == {"digits", "mnist", "cifar10", "cifar100"}
    call("presets", "--format", "json")
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert (listed["mnist-cnn"]["needs"], listed["mnist-cnn"]["missing"]) == (["mnist"], [])
    assert len(listed["phones"]["missing"]) == 3
    assert listed["flashback-cinic10"]["missing"] == ["cinic10"]


def test_every_preset_is_printed_as_an_experiment_that_can_be_saved_and_run() -> None:
    for name in [*preset_names(), *(example_of(part) for part in part_names())]:
        assert Experiment.parse(tomllib.loads(printed(name))) == Experiment.parse(preset(name)), name
    for part in part_names():
        printed_part = {key: value for key, value in tomllib.loads(printed(part)).items() if key != "extends"}
        assert printed_part == part_table(part)
        assert f"as in {example_of(part)}" in printed(part)


def test_a_preset_is_printed_with_its_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("presets", "churn") == 0
    assert "# many short spells, few long ones" in capsys.readouterr().out
    assert call("presets", "digits+fedntd") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# 300 devices learn")
    assert "# FedNTD with" in shown
    assert "crash_rate = 0.02                        # per selected device and round" in shown
    assert call("presets", "fedntd-cifar10-shards2") == 0
    assert "# For fedcurv, moon it sets other values" in capsys.readouterr().out
    assert call("presets", "fedntd", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["example"] == "digits+fedntd"
    assert call("presets", "fedntdd") == 2
    assert "did you mean digits+fedntd?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits-small", "digits", "digits-tasks+mfcl", "phones", "utterances", "churn+wsm"])
def test_an_experiment_to_start_from_is_its_preset_with_every_table(name: str) -> None:
    table = tomllib.loads(starter_text(name, "mine.toml"))
    assert table.keys() == {*Experiment.model_fields, "runtime"} - {"traces", "code"}
    assert Runtime.parse(table.pop("runtime")) == Runtime()
    assert table.pop("name") == "mine"
    assert Experiment.parse(table | {"name": "x"}) == Experiment.parse(preset(name) | {"name": "x"})


def test_the_name_of_its_file_stays_in_the_comments_of_an_experiment() -> None:
    assert "#   fedemu run 'two words.toml' " in starter_text("digits", "two words.toml")
    assert tomllib.loads(starter_text("digits", "a\nrounds = 7\n.toml"))["rounds"] == 40


def test_an_experiment_is_written_once_and_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("init") == 0
    captured = capsys.readouterr()
    assert captured.out == "experiment.toml\n"
    assert "fedemu run experiment.toml" in captured.err
    written = Path("experiment.toml").read_text()
    assert "lr = 0.1                                 # learning rate of the first round (default 0.1)" in written
    assert load_experiment("experiment.toml", [], {})[0].rounds == 5
    assert call("init") == 2
    assert capsys.readouterr().err == "fedemu: experiment.toml exists, and is not overwritten; name another file\n"
    assert call("init", "--", "-o.toml") == 0
    assert "run it with:   fedemu run ./-o.toml\n" in capsys.readouterr().err
    assert call("init", "other/one.toml", "--from", "digits+fedprox") == 0
    assert load_experiment("other/one.toml", [], {})[0].algorithm.name == "fedprox"
    for arguments, said in (
        (("init", "."), "is a folder; name a file in it"),
        (("init", "a.toml", "--from", "digitz"), '--from "digitz" is no preset; did you mean digits?'),
        (("init", "a.toml", "--from", "moon"), "moon is a method, which follows a preset: write digits+moon"),
        (("init", "experiment.toml/b.toml"), "experiment.toml/b.toml cannot be written: "),
        (("schema", "--out", "experiment.toml/b.json"), "experiment.toml/b.json cannot be written: "),
    ):
        capsys.readouterr()
        assert call(*arguments) == 2
        assert said in capsys.readouterr().err
    assert not Path("a.toml").exists()


@pytest.mark.parametrize("words", [("init", "mine.toml"), ("schema", "--out", "mine.json")])
def test_a_file_of_which_a_disk_takes_only_a_part_is_not_left_and_ends_the_command_with_5(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], files_end_at: Any
) -> None:
    with files_end_at(100):
        assert call(*words) == 5
    assert capsys.readouterr().err == f"fedemu: {words[-1]} cannot be written: File too large; name another file\n"
    assert not any(Path().iterdir())
