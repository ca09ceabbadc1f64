"""What a page tells of a run first: settings in words, the date, and the command that makes the run again."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.run import Run
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.presets import preset
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.results.words import command_again, date_of, settings_in_words, table_of, without_settings


def experiment(name: str, *overrides: str) -> Experiment:
    return load_experiment(name, overrides, {})[0]


@pytest.mark.parametrize("text", [None, "", "name = ", "\udcff"])
def test_a_run_whose_settings_cannot_be_read_tells_how_they_come_back(text: str | None, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    if text is not None:
        config.write_text(text, encoding="utf-8", errors="surrogateescape")
    what, first = (
        ("is gone", "resume") if text is None else ("holds no settings that can be read", "remove it and resume")
    )
    again = f"fedemu run --resume {shlex.quote(str(tmp_path))}"
    assert without_settings(tmp_path) == (
        f"{config} {what}, so no settings of the run are told; {first} the run ({again}), which writes it back from "
        "the checkpoint"
    )
    config.write_text('name = "digits"\n')
    assert without_settings(tmp_path) == ""


def test_an_experiment_is_told_in_words() -> None:
    told = settings_in_words(experiment("digits-drift+coordinated-replay+fedprox", "local.steps=1").table())
    assert told == {
        "method": "fedprox (mu 1)",
        "data": "digits, Dirichlet alpha 1",
        "stream": "drift: 10 periods of 5 rounds",
        "replay": "coordinated, 20 samples kept",
        "model": "mlp hidden [64]",
        "devices": "20, of which 10 take part in a round",
        "local training": "1 step, batches of 10, learning rate 0.1",
    }
    shards = 'data.partition={kind="shards", per_device=3}'
    assert settings_in_words(
        experiment(
            "digits-tasks+lwf", "algorithm.loss=wsm", shards, "fleet.devices=1200", "fleet.per_round=999"
        ).table()
    ) == {
        "method": "fedavg, loss wsm, local term lwf (coefficient 1, temperature 2)",
        "data": "digits, shards, 3 per device",
        "stream": "classes: 5 tasks of 6 rounds",
        "model": "mlp hidden [64]",
        "devices": "1,200, of which 999 take part in a round",
        "local training": "5 epochs, batches of 10, learning rate 0.05",
    }


def test_a_file_that_cannot_be_read_is_no_table() -> None:
    assert table_of(Run(Path(), 'name = "mine"', (), [], {})) == {"name": "mine"}
    assert table_of(Run(Path(), "name = ", (), [], {})) == {}


def test_an_old_file_without_settings_tells_nothing_of_them() -> None:
    assert settings_in_words({"name": "old"}) == {"stream": "static: all samples from the first round on"}


@pytest.mark.parametrize(
    ("name", "overrides", "command"),
    [
        ("digits", [], "fedemu run digits"),
        ("digits+fedntd", ["seed=3", "rounds=7"], "fedemu run digits+fedntd --seed 3 --rounds 7"),
        ("digits", ["local.lr=0.05", 'replay.final="top"'], None),
        ("digits", ["algorithm.terms={ 'mine.py:held' = { width = 2 } }"], None),
        ("digits-tasks+mfcl", ["fleet.devices=12"], "fedemu run digits-tasks+mfcl --devices 12"),
        ("digits", ["model.name=cnn"], None),
        ("wsm-cifar10", ["fleet.devices=50", "fleet.per_round=10"], None),
        ("digits+fedprox", ["algorithm.name=moon", "algorithm.options.mu=1.0"], None),
        ("digits+fedprox", ["algorithm.name=fedavg"], "fedemu run digits+fedprox --set 'algorithm.name=\"fedavg\"'"),
        (
            "digits+fedprox",
            ["algorithm.options.kind=b"],
            "fedemu run digits+fedprox --set 'algorithm.options.kind=\"b\"'",
        ),
        ("digits", ["availability.kind=always"], "fedemu run digits --set 'availability={ kind = \"always\" }'"),
    ],
)
def test_the_command_makes_the_same_experiment(name: str, overrides: list[str], command: str | None) -> None:
    wanted = experiment(name, *[override for override in overrides if "replay" not in override])
    said = command_again(wanted.table(), Path("runs/digits-1"))
    assert command in (None, said)
    _, _, source, *flags = shlex.split(said)
    short = {"--seed": "seed", "--rounds": "rounds", "--devices": "fleet.devices"}
    again = [
        value if flag == "--set" else f"{short[flag]}={value}"
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    ]
    assert experiment(source, *again).digest == wanted.digest


def test_an_experiment_that_lacks_a_setting_of_its_preset_is_run_from_its_file() -> None:
    table = experiment("digits-drift+lwf", "algorithm.terms={}").table()
    assert command_again(table, Path("runs/one")) == "fedemu run runs/one/config.toml"


def test_an_experiment_whose_preset_is_none_without_other_settings_is_run_from_its_file() -> None:
    stream = "stream={kind='drift', periods=2, rounds_per_period=2}"
    table = experiment("digits-small+uniform-replay", stream).table()
    assert command_again(table, Path("runs/one")) == "fedemu run runs/one/config.toml"


def test_an_experiment_that_is_no_preset_is_run_from_its_file() -> None:
    table = Experiment.parse(preset("digits") | {"name": "mine"}).table()
    assert command_again(table, Path("my runs/one")) == "fedemu run 'my runs/one/config.toml'"


def run(path: Path, summary: dict[str, Any]) -> Run:
    return Run(path, "", (), [], summary)


def test_the_date_is_that_of_the_end_or_of_the_last_row(tmp_path: Path) -> None:
    assert date_of(run(tmp_path, {"ended": "2026-03-01T12:30:10+00:00"})) == "2026-03-01 12:30 UTC"
    assert date_of(run(tmp_path, {})) == ""
    (tmp_path / "metrics.jsonl").write_text("")
    os.utime(tmp_path / "metrics.jsonl", (86400, 86400))
    assert date_of(run(tmp_path, {})) == "1970-01-02 00:00 UTC"
    assert date_of(run(tmp_path, {"ended": "2026-03-01T1"})) == "1970-01-02 00:00 UTC"
