"""Accuracy after each epoch of local training, measured after a run, against a run that goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

from fedemu.coordinator.record.records import read_record, write_record
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.ops.assembly.local_curves import local_curves
from fedemu.ops.cli import commands
from fedemu.ops.experiment.sources import read_frozen
from fedemu.protocol.errors import ConfigurationError

Play = Callable[..., Summary]
SETTINGS = ("algorithm.name='fedntd'", "local.epochs=3", "diagnose.every=1")


def test_the_last_epoch_is_that_of_the_round_that_comes_next(in_one_process: Play, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    in_one_process(directory, *SETTINGS, "rounds=1")
    first, digest = read_frozen(directory), (directory / "model.safetensors").read_bytes()
    drawn = local_curves(directory, first, 4)
    assert (drawn["round"], len(drawn["devices"]), drawn["epochs"]) == (2, 4, [0, 1, 2, 3])
    assert (directory / "model.safetensors").read_bytes() == digest
    before = {path: path.read_bytes() for path in (directory / "checkpoint").iterdir()}
    # The second round is played, and its devices tell whom to look at in the first round's checkpoint.
    in_one_process(directory, *SETTINGS, "rounds=2")
    line = read_run(directory).diagnosis[1]
    for path in (directory / "checkpoint").iterdir():
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)
    found = local_curves(directory, first, line["devices"])
    assert found["in_local"][0] == pytest.approx(line["before_in_local"])
    assert found["out_local"][0] == pytest.approx(line["before_out_local"])
    assert found["in_local"][3] == pytest.approx(line["locals"]["in_local"])
    assert found["out_local"][3] == pytest.approx(line["locals"]["out_local"])
    assert found["in_local"][1] != found["in_local"][3]


class Branching(nn.Module):
    """A model that only torch's ordinary means can compute, because its values decide what happens next."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.top = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.top(x.flatten(1))
        return logits if logits.sum().item() > 0 else logits * 1


def test_a_model_of_ones_own_is_computed_as_in_the_run(in_one_process: Play, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    in_one_process(directory, f"model.name={__file__}:Branching", "rounds=1", "local.epochs=2")
    assert len(local_curves(directory, read_frozen(directory), 2)["in_local"]) == 3


def test_more_curves_than_there_are_devices_are_those_of_all_of_them_and_this_is_told(
    in_one_process: Play, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "run"
    in_one_process(directory, "rounds=1", "local.epochs=1", "fleet.devices=3", "fleet.per_round=2")
    written: list[Path] = []
    monkeypatch.setattr("fedemu.ops.report.report.write_report", lambda run: written.append(run) or run)
    for asked, told in (
        ("3", ""),
        ("4", "fedemu: warning: --curves 4 is more than the 3 devices with samples; all train\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            commands.command(["report", str(directory), "--curves", asked], prog_name="fedemu")
        assert (ended.value.code, capsys.readouterr().err) == (0, told)
        assert json.loads((directory / "local_curves.json").read_text())["devices"] == [0, 1, 2]
        monkeypatch.undo()  # once the report is really drawn
    assert written == [directory]
    assert (directory / "report.html").exists()


def test_a_run_without_a_checkpoint_or_with_other_data_has_no_curves(in_one_process: Play, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    in_one_process(directory, "rounds=1")
    document = read_record(directory / "checkpoint", 1)
    document["record"]["data"] = "0" * 64
    write_record(directory / "checkpoint", 1, document)
    with pytest.raises(ConfigurationError, match=r"are not those with which this run began \(digest 0{12}"):
        local_curves(directory, read_frozen(directory))
    for path in (directory / "checkpoint").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match="has no checkpoint"):
        local_curves(directory, read_frozen(directory))
