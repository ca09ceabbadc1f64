"""Sweeps: which runs a file means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedemu.ops.cli.commands import app
from fedemu.ops.experiment.presets import names_in
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.sweeps.plan import SWEEPS, Part, Planned, is_sweep, load_sweep, planned, runs_of
from fedemu.protocol.errors import ConfigurationError

TWO = """
[[parts]]
name = "one"
experiments = ["digits", "digits+fedntd"]
seeds = [3, 4]
rounds = 2
set = ["local.lr=0.5"]

[[parts]]
name = "other"
experiments = ["digits"]
"""


def written(folder: Path, text: str) -> str:
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_every_experiment_is_run_with_every_seed_the_first_seeds_first(tmp_path: Path) -> None:
    runs = planned(load_sweep(written(tmp_path, TWO)))
    assert [str(run.folder) for run in runs] == [
        "one/digits/seed-3",
        "one/digits+fedntd/seed-3",
        "one/digits/seed-4",
        "one/digits+fedntd/seed-4",
        "other/digits/seed-1",
    ]
    assert [run.overrides for run in runs[3:]] == [("local.lr=0.5", "rounds=2"), ()]


def test_a_source_is_a_sweep_if_it_has_parts_or_comes_with_fedemu(tmp_path: Path) -> None:
    assert is_sweep(written(tmp_path, TWO))
    assert not is_sweep(written(tmp_path, 'name = "an experiment"'))
    assert names_in(SWEEPS) == ["evidence", "papers"]
    assert [is_sweep(source) for source in ("evidence", "digits", str(tmp_path))] == [True, False, False]


def test_nobody_knows_how_long_a_run_takes_of_which_the_part_says_nothing(tmp_path: Path) -> None:
    text = TWO.replace("rounds = 2", "seconds = 5\nslow = { digits = 9 }")
    runs = planned(load_sweep(written(tmp_path, text)))
    assert [run.seconds for run in runs] == [9, 5, 9, 5, 0]


def test_settings_for_a_single_method_are_those_of_its_runs_alone(tmp_path: Path) -> None:
    text = (
        'parts = [{ name = "a", presets = ["digits"], methods = ["wsm", "ewc"], tuned = { ewc = ["local.lr=0.5"] } }]'
    )
    runs = planned(load_sweep(written(tmp_path, text)))
    assert [(str(run.folder), run.overrides) for run in runs] == [
        ("a/digits+wsm/seed-1", ()),
        ("a/digits+ewc/seed-1", ("local.lr=0.5",)),
    ]
    text = 'parts = [{ name = "a", experiments = ["digits", "churn"], tuned = { churn = ["local.lr=0.5"] } }]'
    runs = planned(load_sweep(written(tmp_path, text)))
    assert [run.overrides for run in runs] == [(), ("local.lr=0.5",)]


def test_a_preset_without_methods_is_run_as_it_is() -> None:
    assert [str(run.folder) for run in runs_of(Part(name="a", presets=["churn"]))] == ["a/churn/seed-1"]


def test_a_pattern_chooses_among_the_folders(tmp_path: Path) -> None:
    sweep = load_sweep(written(tmp_path, TWO))
    assert [str(run.folder) for run in planned(sweep, "fedntd.*4")] == ["one/digits+fedntd/seed-4"]
    with pytest.raises(ConfigurationError, match=r"--only moon fits no run .*one/digits/seed-3"):
        planned(sweep, "moon")
    with pytest.raises(ConfigurationError, match="is no regular expression"):
        planned(sweep, "(")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "parts is missing"),
        ('[[parts]]\nname = "a"\nmethods = ["wsm"]', "a has methods, and no presets"),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\nsizes.tiny = { methods = ["wsm"] }',
            "a has methods, and no presets",
        ),
        ('[[parts]]\nname = "a"', "a names no experiments and no presets"),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\ntuned = { wsm = ["local.lr=1"] }',
            "tuned names wsm, which is no method of the part a",
        ),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\nset = ["seed=3"]',
            "a sets seed; write it as seeds",
        ),
        ('[[parts]]\nname = "a"\nexperiments = ["digits"]\ngrid = { seed = [3, 4] }', "a sets seed; write it as seeds"),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\ngrid = { "runtime.trainers" = [1, 2] }',
            "the grid of the part a varies runtime.trainers, a setting of the machine",
        ),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\nrounds = 3\ngrid = { rounds = [1, 2] }',
            "the grid of the part a varies rounds, which the part sets to one value, too",
        ),
        (
            '[[parts]]\nname = "a"\nexperiments = ["digits"]\ntuned.digits = ["local.lr=1"]\n'
            'grid = { "local.lr" = [1, 2] }',
            r"the grid of the part a varies local\.lr, which",
        ),
        ("parts = []", r"parts = \[\] must be a list that is not empty"),
        ("parts = 1 2", "is not valid TOML"),
        ('[[parts]]\nname = "a/b"\nexperiments = ["digits"]', r'parts\[0\].name = "a/b" must be made of letters'),
        ('[[parts]]\nname = "a"\nexperiments = ["digits"]\nepochs = 1', r"parts\[0\].epochs is no setting"),
        (TWO.replace("other", "one"), "two parts are named one"),
        (TWO.replace("[3, 4]", '"4-3"'), r"sweep\.toml: 4-3 is no list of seeds"),
        (TWO.replace("[3, 4]", "[]"), r"parts\[0\].seeds = \[\] must be a list that is not empty"),
        (TWO.replace("[3, 4]", "[3, -1]"), r"parts\[0\].seeds\[1\] = -1 must be"),
        (TWO.replace("[3, 4]", "[4294967296]"), r"parts\[0\].seeds\[0\] = 4294967296 must be"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        load_sweep(written(tmp_path, text))


def test_a_run_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    sweep = load_sweep(written(tmp_path, TWO.replace("[3, 4]", "[3, 3]")))
    with pytest.raises(ConfigurationError, match="two runs of the sweep would be written to one/digits/seed-3"):
        planned(sweep)


def test_a_name_that_is_too_long_for_a_folder_is_cut_and_stays_that_of_one_run_alone() -> None:
    keys = [f"algorithm.options.{'é' * 30}{number}" for number in range(6)]
    long = [Planned("", "digits", 1, (), tuple((key, value) for key in keys)) for value in (1, 2)]
    names = [run.group.name for run in long]
    assert [len(name.encode()) <= 200 for name in names] == [True, True]
    assert len({*names}) == 2
    assert names[0].startswith("digits,algorithm.options.")
    assert Planned("", "digits", 1, (), (("local.lr", 0.1),)).group.name == "digits,local.lr=0.1"


def test_more_runs_than_a_sweep_can_have_are_refused() -> None:
    grid = {"local.lr": [number / 1000 for number in range(1, 501)], "fleet.per_round": [*range(1, 52)]}
    with pytest.raises(ConfigurationError, match=r"^the part many has more than 100,000 runs; name fewer$"):
        runs_of(Part(name="many", experiments=["digits", "churn"], seeds=[1, 2], grid=grid))


def test_no_run_has_the_place_of_what_a_sweep_writes(tmp_path: Path) -> None:
    sweep = load_sweep(written(tmp_path, TWO.replace('"other"', '"compare"')))
    with pytest.raises(ConfigurationError, match="a sweep writes compare itself; give the part compare another name"):
        planned(sweep)
    (tmp_path / "compare.toml").touch()
    told = CliRunner().invoke(app, ["sweep", str(tmp_path / "compare.toml"), "--out", str(tmp_path / "out"), "--list"])
    assert (told.exit_code, told.stdout) == (2, "")
    assert "give the experiment compare another name" in told.stderr


def test_an_unknown_name_is_met_with_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match='no sweep "evidenze"; did you mean evidence'):
        load_sweep("evidenze")
    with pytest.raises(ConfigurationError, match=r'no sweep "all"; the shipped sweeps are .*evidence'):
        load_sweep("all")


@pytest.mark.parametrize("name", names_in(SWEEPS))
def test_the_shipped_sweeps_hold_experiments_that_can_be_read(name: str) -> None:
    assert (SWEEPS / f"{name}.toml").read_text(encoding="utf-8").startswith("# ")
    for run in planned(load_sweep(name)):
        load_experiment(run.experiment, run.overrides, {})


@pytest.mark.parametrize(
    ("words", "environment", "seed"),
    [
        ([], {}, 1),
        (["--set", "seed=7"], {}, 7),
        ([], {"FEDEMU_SEED": "9"}, 9),
        (["--seeds", "3"], {"FEDEMU_SEED": "9"}, 3),
    ],
)
def test_the_seed_of_a_sweep_is_that_of_its_experiment(
    monkeypatch: pytest.MonkeyPatch, words: list[str], environment: dict[str, str], seed: int
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["sweep", "digits-small", "--out", "nowhere", "--list", *words])
    assert result.stdout == f"digits-small/seed-{seed}\n"


def test_methods_are_added_to_a_file_and_to_its_parts(tmp_path: Path) -> None:
    file = written(tmp_path, 'name = "mine"\nseed = 4\n')
    added = ["--method", "scaffold", "--method", "own.py:Mine"]
    for source, name in ((file, "sweep"), (f"{file}+wsm", "sweep+wsm")):
        result = CliRunner().invoke(app, ["sweep", source, "--out", "nowhere", "--list", *added])
        assert result.stdout == f"{name}+scaffold/seed-4\n{name}+Mine/seed-4\n"


def test_presets_are_run_with_every_method_and_every_point_of_the_grid(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "x"\n[algorithm]\noptions = { mu = 2.0 }\nname = "fedprox"\n')
    text = f"""
        [[parts]]
        name = "product"
        presets = ["digits", "churn"]
        methods = ["wsm", "{tmp_path}/mine.toml", "lib/own.py:Mine"]
        seeds = "3-4"
        [parts.grid]
        "local.lr" = [0.1, 0.2]
    """
    runs = planned(load_sweep(written(tmp_path, text)))
    assert len(runs) == 2 * 3 * 2 * 2
    first, mine, module = runs[0], runs[2], runs[4]
    assert str(first.folder) == "product/digits+wsm,local.lr=0.1/seed-3"
    assert str(mine.folder) == "product/digits+mine,local.lr=0.1/seed-3"
    assert mine.overrides == ('algorithm.name="fedprox"', "algorithm.options={ mu = 2.0 }", "local.lr=0.1")
    assert str(module.folder) == "product/digits+Mine,local.lr=0.1/seed-3"
    experiment, _ = load_experiment(mine.experiment, mine.overrides, {})
    assert (experiment.algorithm.name, experiment.algorithm.options, experiment.local.lr) == ("fedprox", {"mu": 2}, 0.1)
