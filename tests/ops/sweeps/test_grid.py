"""Grids: how their values are read, combined and named."""

from __future__ import annotations

import pytest

from fedemu.ops.sweeps.grid import name_of, override_of, parse_grid, points
from fedemu.protocol.errors import ConfigurationError


def test_commas_in_brackets_braces_and_quotes_part_nothing() -> None:
    grid = parse_grid(
        [
            "model.hidden=[64],[64, 64]",
            'data.partition={ kind = "iid" },{ kind = "dirichlet", alpha = 0.1 }',
            r"""name="a,b",c,"d\",e","[",'f\','g',h,"i\"" """,
            r'data.own=["[", "d\",e"],["f"]',
            " local.lr = 0.01 , 1e-3 ",
            r"data.path=a\b, c",
        ]
    )
    assert grid == {
        "model.hidden": [[64], [64, 64]],
        "data.partition": [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.1}],
        "name": ["a,b", "c", 'd",e', "[", "f\\", "g", "h", 'i"'],
        "data.own": [["[", 'd",e'], ["f"]],
        "local.lr": [0.01, 0.001],
        "data.path": [r"a\b", "c"],
    }


def test_dates_and_times_are_text() -> None:
    grid = parse_grid(["data.dataset=2024-01-01,2024-01-02T03:04:05Z,03:04:05"])
    assert grid == {"data.dataset": ["2024-01-01", "2024-01-02T03:04:05Z", "03:04:05"]}
    assert override_of(("data.dataset", "2024-01-01")) == 'data.dataset="2024-01-01"'
    assert name_of((("data.dataset", "2024-01-01"),)) == "data.dataset=2024-01-01"


def test_the_last_key_changes_fastest_and_every_point_has_a_name_and_overrides() -> None:
    found = list(points({"local.lr": [0.1, 1], "model.hidden": [[64, 32]]}))
    assert [name_of(point) for point in found] == [
        "local.lr=0.1,model.hidden=64-32",
        "local.lr=1,model.hidden=64-32",
    ]
    assert [override_of(choice) for choice in found[0]] == ["local.lr=0.1", "model.hidden=[64, 32]"]
    assert list(points({})) == [()]


def test_values_that_no_folder_can_be_called_by_get_a_mark_that_stays_the_same() -> None:
    one, other = ({"kind": "dirichlet", "alpha": alpha} for alpha in (0.1, 0.5))
    named = name_of((("data.partition", one),))
    assert named == name_of((("data.partition", dict(one)),)) != name_of((("data.partition", other),))
    assert named == "data.partition=kind-dirichlet-alpha-0.1-2729bb"
    assert name_of((("model.hidden", [[64], [64]]),)) == "model.hidden=64-64-a1a74a"
    assert "/" not in name_of((("algorithm.name", "a/b"),))
    assert name_of((("name", ""), ("data.dataset", "a" * 40))) == f"name=12ae32,data.dataset={'a' * 40}"
    long, longer = (name_of((("name", "a" * length),)) for length in (300, 301))
    assert len(long) < 60
    assert long != longer


def test_a_key_may_name_something_of_ones_own() -> None:
    for key, folder in {
        "algorithm.terms.mine:held.width": "algorithm.terms.mine-held.width=1",
        'algorithm.terms."code/mine.py:held".width': "algorithm.terms.code-mine.py-held.width=1",
    }.items():
        [point] = points(parse_grid([f"{key}=1"]))
        assert override_of(point[0]) == f"{key}=1"
        assert name_of(point) == folder


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["local.lr"], "is no grid; write KEY=VALUE,VALUE as in local.lr=0.01,0.1"),
        (["local lr=1,2"], "is no grid; write KEY=VALUE,VALUE"),
        (["local.lr=0.1, "], "lacks a value"),
        (["data.partition={ kind = 1, alpha = 2 },{ alpha = 2, kind = 1 }"], "twice; name every value once"),
        (["local.lr=0.1,0.10"], "names 0.1 twice"),
        (["local.lr=1", "local.lr=2"], "--grid local.lr is there twice"),
        (["seed=1,2"], "write --seeds 1,2"),
        (["runtime.trainers=1,2"], "changes no result"),
        (["track.jsonl=true,false"], "changes no result"),
        (["model.hidden=[64,[32]"], "has no ] at its end"),
        (["model.hidden=[64,]x]"], "is not a TOML value"),
        (["stream.columns=[2024-01-01]"], "--grid stream.columns[0] = 2024-01-01 is a date, which no setting takes"),
    ],
)
def test_a_mistake_is_one_sentence(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_grid(options)
    assert sentence in str(refused.value)
