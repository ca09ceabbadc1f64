"""The JSON Schema of experiments: it takes what is shipped, refuses what is wrong, and explains every key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fedemu.ops.cli import commands
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.presets import example_of, part_names, preset, preset_names
from fedemu.ops.experiment.printed import printed
from fedemu.ops.experiment.schema import schema
from fedemu.ops.experiment.starter import starter_text
from fedemu.ops.experiment.toml_text import SCHEMA_LINE

SCHEMA = schema()
jsonschema.Draft202012Validator.check_schema(SCHEMA)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_all_presets_and_their_parts_fit_and_so_do_frozen_experiments() -> None:
    tables = {name: preset(name) for name in preset_names()}
    tables |= {name: preset(example_of(name)) for name in part_names()}
    frozen = Experiment.parse(preset("digits-tasks"))
    tables |= {
        "tracked": {"track": {"to": ["tensorboard"], "out": "runs/tracking"}, "tree": {"edges": [2, 4]}},
        "one": {"track": {"to": "wandb"}, "tree": {"edges": 2}},
    }
    tables |= {"frozen": tomllib.loads(frozen.to_toml()), "starter": tomllib.loads(starter_text("digits", "x.toml"))}
    wrong = {name: [error.message for error in VALIDATOR.iter_errors(table)] for name, table in tables.items()}
    assert {name: messages for name, messages in wrong.items() if messages} == {}


@pytest.mark.parametrize(
    "table",
    [
        {"local": {"lz": 1}},
        {"local": {"lr": "fast"}},
        {"local": {"lr": -1}},
        {"stream": {"kind": "no"}},
        {"stream": {"kind": "drift", "tasks": 3}},
        {"stream": {"tasks": 3}},
        {"rounds": 0},
        {"fleet": {"participation": 2}},
        {"runtime": {"trainers": -1}},
        {"runtime": {"track": {"to": "mlflow"}}},
        {"traces": {}},
        {"zzz": 1},
    ],
)
def test_what_is_wrong_is_refused(table: dict[str, Any]) -> None:
    assert not VALIDATOR.is_valid(table)


def test_every_key_is_explained_and_has_its_default() -> None:
    silent = [
        f"{name}.{key}"
        for name, definition in SCHEMA["$defs"].items()
        for key, setting in definition.get("properties", {}).items()
        if not setting.get("description")
    ]
    assert silent == []
    local = SCHEMA["$defs"]["Local"]["properties"]["lr"]
    assert (local["default"], local["description"]) == (0.1, "learning rate of the first round")
    assert "scaffold" in SCHEMA["$defs"]["AlgorithmSpec"]["properties"]["name"]["examples"]


def test_presets_and_new_experiments_carry_the_line_by_which_editors_find_it() -> None:
    for text in (printed("churn"), printed("digits+wsm"), printed("digits-drift"), starter_text("digits", "x.toml")):
        assert SCHEMA_LINE in text.splitlines()[:4]
    assert SCHEMA_LINE not in printed("wsm")


def test_it_is_written_to_a_file_and_never_over_an_experiment(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            commands.command(["schema", "--out", str(tmp_path / "a.json")], prog_name="fedemu")
        assert not ended.value.code
    mine = tmp_path / "mine.toml"
    mine.write_text(starter_text("digits", "mine.toml"))
    with pytest.raises(SystemExit) as ended:
        commands.command(["schema", "--out", str(mine)], prog_name="fedemu")
    assert ended.value.code == 2
    assert mine.read_text() == starter_text("digits", "mine.toml")
