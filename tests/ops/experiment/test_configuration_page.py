"""``docs/configuration.md`` lists the settings, defaults and kinds of the code, ``docs/presets.md`` the presets."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from fedemu.algorithms.registry import MODELS
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.mistakes import setting_paths
from fedemu.ops.experiment.presets import methods, presets
from fedemu.ops.experiment.sources import machine_paths
from fedemu.ops.experiment.tables.stream import Strategy, Stream
from fedemu.ops.experiment.toml_text import toml_value

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "configuration.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## \[?([\w ]+)\]?\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
NAME = re.compile(r"`([a-z0-9.-]+)`")
PATHS = [*setting_paths(Experiment), *machine_paths()]


def section_of(path: str) -> str:
    if path.startswith("faults.downtime."):
        return SECTIONS["profile"]  # where the kinds of quantities are explained
    return SECTIONS.get(path.split(".")[0], SECTIONS["Top level"])


@pytest.mark.parametrize("path", PATHS)
def test_every_setting_is_explained_in_its_section(path: str) -> None:
    # A table of the experiment is explained by having a section of its own.
    assert path in SECTIONS or f"`{path.rsplit('.', 1)[-1]}`" in section_of(path)


def rows(section: str) -> dict[str, str]:
    """The keys and defaults in those tables of the page that have them."""
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", section, flags=re.MULTILINE))


def test_the_defaults_are_those_of_the_code() -> None:
    experiment = tomllib.loads(Experiment().to_toml())
    code = {"Top level": experiment, **experiment, "runtime": Runtime().model_dump(mode="json")}
    code["track"] = code["runtime"]["track"]
    told = {title: rows(text) for title, text in SECTIONS.items()}
    assert len([default for table in told.values() for default in table.values()]) > 50
    for title, table in told.items():
        for key, default in table.items():
            assert tomllib.loads(f"value = {default}")["value"] == code[title][key], f"{title}.{key}"


def test_keys_of_kinds_have_their_defaults_in_brackets() -> None:
    for kind, keys in {
        "exponential": {"mean_online": "3600.0", "mean_offline": "1800.0"},
        "weibull": {"shape": "0.7", "scale_online": "3600.0", "scale_offline": "1800.0"},
        "diurnal": {"mean": "0.5", "amplitude": "0.4", "peak_hour": "2.0", "spread_hours": "2.0", "spell": "3600.0"},
    }.items():
        values = Experiment.parse({"availability": {"kind": kind}}).availability.model_dump(exclude={"kind"})
        assert {key: str(value) for key, value in values.items()} == keys
        assert all(f"`{key}` ({value})" in SECTIONS["availability"] for key, value in keys.items())


@pytest.mark.parametrize("kind", ["periods", "drift", "window", "classes"])
def test_keys_of_streams_have_their_defaults_in_brackets(kind: str) -> None:
    for key, value in Experiment.parse({"stream": {"kind": kind}}).stream.model_dump(exclude={"kind"}).items():
        assert f"`{key}` ({json.dumps(value)})" in SECTIONS["stream"]


@pytest.mark.parametrize("name", MODELS)
def test_every_option_of_a_model_is_told_with_its_default(name: str) -> None:
    items = re.findall(
        r"^- ((?:`\w+`,? ?)+)(?:for texts)?: (.*?)(?=^- |^$)", SECTIONS["model"], re.MULTILINE | re.DOTALL
    )
    told = " ".join(text for models, text in items if f"`{name}`" in models)
    _, _, *options = inspect.signature(MODELS[name]).parameters.values()
    assert set(re.findall(r"`(\w+) = ", told)) == {option.name for option in options}
    for option in options:
        assert f"`{option.name} = {toml_value(option.default)}`" in told


def test_every_kind_of_stream_and_every_strategy_of_replay_is_listed() -> None:
    kinds = [get_args(get_type_hints(table)["kind"])[0] for table in get_args(get_args(Stream)[0])]
    for section, names in {"stream": kinds, "replay": get_args(Strategy)}.items():
        assert {*names} <= {*re.findall(r"^\| `(\w+)` \| ", SECTIONS[section], flags=re.MULTILINE)}


def test_every_preset_and_every_method_is_listed() -> None:
    page = (DOCS / "presets.md").read_text(encoding="utf-8")
    told = {name for line in page.splitlines() if line.startswith("|") for name in NAME.findall(line)}
    assert {name for name, _ in (*presets(), *methods())} <= told
