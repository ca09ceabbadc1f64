"""The methods that are added to a preset or a file: as parts of fedemu, TOML files, and code of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.sweeps.methods import folder_of, label, resolved
from fedemu.protocol.errors import ConfigurationError

MINE = """
name = "what the file calls itself"
rounds = 3
model = {}

[algorithm]
width = 2
terms = { ewc = { kind = "ewc" } }
kind = "mine"

[local]
lr = 0.5
"""


def test_a_part_of_fedemu_follows_the_preset() -> None:
    assert resolved("digits", "uniform-replay+wsm") == ("digits+uniform-replay+wsm", (), "")
    assert label("uniform-replay+wsm") == "uniform-replay+wsm"


def test_a_method_follows_a_file_and_folders_are_called_by_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[local]\nlr = 0.5\n")
    assert resolved("a/own.toml", "wsm") == ("a/own.toml+wsm", (), "")
    assert resolved("a/own.toml", "mine.py:Mine")[2] == "own+Mine"
    assert resolved("a/own.toml+wsm", str(tmp_path / "mine.toml")) == (
        "a/own.toml+wsm", ("local.lr=0.5",), "own+wsm+mine",
    )  # fmt: skip
    assert [folder_of(name) for name in ("digits+wsm", "a/own.toml", "a.toml/own.toml+wsm")] == [
        "digits+wsm", "own", "own+wsm",
    ]  # fmt: skip


def test_code_of_ones_own_becomes_the_algorithm() -> None:
    for method in ("mine.py:Mine", "a.b:Mine"):
        assert resolved("digits", method) == ("digits", (f'algorithm.name="{method}"',), "digits+Mine")
        assert label(method) == "Mine"


def test_a_file_gives_its_settings_and_what_a_method_is_comes_before_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINE)
    method = str(tmp_path / "mine.toml")
    preset, overrides, name = resolved("digits", method)
    assert (preset, name, label(method)) == ("digits", "digits+mine", "mine")
    assert overrides == (
        "rounds=3",
        "model={}",
        'algorithm.kind="mine"',
        "algorithm.width=2",
        'algorithm.terms={ ewc = { kind = "ewc" } }',
        "local.lr=0.5",
    )


def test_a_file_may_extend_a_part_of_fedemu(tmp_path: Path) -> None:
    (tmp_path / "strong.toml").write_text('extends = "scaffold"\nlocal.lr = 0.2\n')
    preset, overrides, name = resolved("digits", str(tmp_path / "strong.toml"))
    assert (preset, overrides, name) == ("digits+scaffold", ("local.lr=0.2",), "digits+strong")
    experiment, _ = load_experiment(preset, list(overrides), {})
    assert (experiment.algorithm.name, experiment.local.lr) == ("scaffold", 0.2)


def test_a_method_without_a_name_is_refused_and_so_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="a method of digits is empty; name a part, a TOML file"):
        resolved("digits", "")
    with pytest.raises(ConfigurationError, match=r"nothing\.toml can't be read"):
        resolved("digits", str(tmp_path / "nothing.toml"))
