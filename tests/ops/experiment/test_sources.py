"""Where an experiment's settings come from: presets, files, environment, overrides, traces and resumed runs."""

from __future__ import annotations

import gzip
import math
import os
import shutil
import statistics
from pathlib import Path

import pytest

from fedemu.device.behaviour.behaviour import Assignment
from fedemu.ops.assembly.behaviours import open_behaviours
from fedemu.ops.experiment import Experiment, Exponential
from fedemu.ops.experiment.presets import preset_path, presets
from fedemu.ops.experiment.sources import check_resume, load_experiment, read_frozen, seed_of, write_frozen
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import AskId

PHONES = """device_id,policy,start_s,end_s,state,bootstrap
1,charging_wifi,0,300,train,1
1,charging_wifi,1000,4000,train,0
2,charging_wifi,500,9000,train,0
2,battery50,500,9000,train,0
3,charging_wifi,0,300,train,1
4,charging_wifi,6000,,train,0
"""
NETWORK = "profile_id,down_mean_kBps,down_std_kBps,up_mean_kBps,up_std_kBps\n0,1000,100,500,50\n1,100,0,50,0\n"
COMPUTE = "model,ai_score,n_trace_model_names\na,100,1\nb,200,1\nc,400,1\n"


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A data folder with tiny files of the format that the preset ``phones`` follows."""
    devices = tmp_path / "data" / "devices"
    devices.mkdir(parents=True)
    (devices / "availability_flash300.csv.gz").write_bytes(gzip.compress(PHONES.encode()))
    (devices / "network_flash.csv").write_text(NETWORK)
    (devices / "compute_aibenchmark.csv").write_text(COMPUTE)
    return tmp_path / "data"


def refused(source: object, *overrides: str, **environment: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(source, overrides, environment)  # type: ignore[arg-type]
    return str(caught.value)


# Precedence


def test_a_pipe_that_has_been_read_is_no_empty_experiment() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"rounds = 7\n")
    os.close(writer)
    assert load_experiment(f"/dev/fd/{reader}", [], {})[0].rounds == 7
    assert "a pipe, which can be read only once; save the experiment as a file" in refused(f"/dev/fd/{reader}")
    os.close(reader)


def test_the_command_line_goes_before_the_environment_before_the_file_before_the_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[local]\nlr = 0.2\nmomentum = 0.2\nweight_decay = 0.2\n")
    environment = {"FEDEMU_LOCAL__LR": "0.3", "FEDEMU_LOCAL__MOMENTUM": "0.3"}
    experiment, _ = load_experiment(path, ["local.lr=0.4"], environment)
    assert (experiment.local.lr, experiment.local.momentum, experiment.local.weight_decay) == (0.4, 0.3, 0.2)
    assert experiment.local.epochs == 5


def test_without_a_source_the_experiment_is_the_preset_digits() -> None:
    assert load_experiment(None, [], {}) == load_experiment("digits", [], {})
    assert load_experiment(None, [], {})[0].name == "digits"


def test_a_table_is_a_source_too() -> None:
    table = {"rounds": 3, "runtime": {"trainers": 2}}
    experiment, runtime = load_experiment(table, ["seed=9"], {})
    assert (experiment.rounds, experiment.seed, runtime.trainers) == (3, 9, 2)
    assert table == {"rounds": 3, "runtime": {"trainers": 2}}


def test_the_settings_of_the_machine_are_outside_the_experiment() -> None:
    plain, _ = load_experiment("digits", [], {})
    experiment, runtime = load_experiment(
        "digits", ["runtime.trainers=2", "runtime.bind=tcp://0.0.0.0:9999"], {"FEDEMU_RUNTIME__TRANSPORT": "memory"}
    )
    assert (runtime.trainers, runtime.bind, runtime.transport) == (2, "tcp://0.0.0.0:9999", "memory")
    assert experiment == plain
    assert experiment.digest == plain.digest
    assert "runtime" not in experiment.to_toml()


def test_overrides_take_toml_values_and_bare_words() -> None:
    overrides = [
        "model.hidden=[128, 64]",
        "clock.kind=wall",
        'name="x"',
        "data.dataset=user/set",
        "algorithm.options.mu=1",
    ]
    experiment, _ = load_experiment("digits", overrides, {})
    assert experiment.model.options == {"hidden": [128, 64]}
    assert (experiment.clock.kind, experiment.name, experiment.data.dataset) == ("wall", "x", "user/set")
    assert experiment.algorithm.options == {"mu": 1}


def test_a_date_in_an_override_or_a_variable_is_text() -> None:
    experiment, runtime = load_experiment(
        "digits", ["data.dataset=2024-01-01"], {"FEDEMU_TRACK__PROJECT": "2024-01-01T12:00:00"}
    )
    assert (experiment.data.dataset, runtime.track.project) == ("2024-01-01", "2024-01-01T12:00:00")


def test_the_last_of_two_overrides_of_one_key_counts() -> None:
    assert load_experiment("digits", ["seed=2", "seed=3"], {})[0].seed == 3


def test_a_table_is_laid_over_settings_inside_it_that_come_before_and_after() -> None:
    for overrides in (["local.lr=0.5", "local={ epochs = 2 }"], ["local={ epochs = 2 }", "local.lr=0.5"]):
        local = load_experiment("digits", overrides, {})[0].local
        assert (local.lr, local.epochs) == (0.5, 2)
    other = ["data.partition.alpha=0.5", "data.partition={ kind = 'iid' }"]
    assert load_experiment("digits", other, {})[0].data.partition.kind == "iid"


def test_the_seed_is_known_before_all_other_settings_are() -> None:
    assert seed_of("digits", [], {}) == 1
    assert seed_of("digits", ["seed=7", "algorithm.options.mu=1"], {"FEDEMU_SEED": "3"}) == 7
    assert seed_of({"seed": 4}, [], {}) == 4
    assert seed_of({"seed": 4}, [], {"FEDEMU_SEED": "3"}) == 3


def test_an_empty_table_takes_away_what_was_set_before() -> None:
    for overrides in (["algorithm.terms={}"], ["algorithm.terms.ewc.coefficient=3", "algorithm.terms={}"]):
        experiment, _ = load_experiment("digits-tasks+ewc", overrides, {})
        assert experiment.algorithm.terms == {}
        assert experiment.algorithm.name == "fedavg"


def test_what_is_set_inside_an_empty_table_does_not_meet_what_lies_below() -> None:
    lwf = {"FEDEMU_ALGORITHM__TERMS__LWF__TEMPERATURE": "3"}
    for overrides, environment in (
        (["algorithm.terms={}", "algorithm.terms.lwf.temperature=3"], {}),
        (["algorithm={ terms = {} }", "algorithm.terms={ lwf = { temperature = 3 } }"], {}),
        (["algorithm.terms={}", "algorithm.terms.lwf.temperature=3"], lwf | {"FEDEMU_LOCAL": "{}"}),
        ([], {"FEDEMU_ALGORITHM__TERMS": "{}"} | lwf),
    ):
        experiment, _ = load_experiment("digits-tasks+ewc", overrides, environment)
        assert experiment.algorithm.terms == {"lwf": {"temperature": 3}}
        assert check_resume(experiment, overrides, {})[0] == experiment
    ordered, _ = load_experiment("digits", ["algorithm.terms={ lwf = { temperature = 3 }, ewc = {} }"], {})
    assert list(ordered.algorithm.terms) == ["lwf", "ewc"]


def test_a_table_that_becomes_another_kind_starts_from_its_defaults() -> None:
    experiment, _ = load_experiment("digits", ["availability.kind=weibull", "availability.shape=0.5"], {})
    assert experiment.availability.model_dump() == {
        "kind": "weibull",
        "shape": 0.5,
        "scale_online": 3600.0,
        "scale_offline": 1800.0,
    }
    same, _ = load_experiment("digits", ["availability.kind=exponential", "availability.mean_online=9"], {})
    assert same.availability == Exponential(mean_online=9.0, mean_offline=90.0)
    assert load_experiment("digits", ["data.partition.kind=iid"], {})[0].data.partition.kind == "iid"
    assert load_experiment("digits", ["profile.seconds_per_sample=0.5"], {})[0].profile.seconds_per_sample == 0.5


def test_another_model_or_method_does_not_inherit_options() -> None:
    assert load_experiment("digits", ["model.name=lenet"], {})[0].model.options == {}
    table = {"algorithm": {"name": "fedprox", "loss": "wsm", "options": {"mu": 1}}}
    algorithm = load_experiment(table, ["algorithm.name=moon"], {})[0].algorithm
    assert (algorithm.loss, algorithm.options) == ("wsm", {})


def test_an_option_that_is_called_kind_changes_alone() -> None:
    partition = {"kind": "flwr", "partitioner": "mine:Own", "options": {"kind": "a", "size": 2}}
    source = {
        "model": {"name": "mine:Net", "kind": "a", "width": 8},
        "algorithm": {"options": {"kind": "a", "mu": 0.5}, "terms": {"mine:held": {"kind": "a", "width": 3}}},
        "data": {"partition": partition},
    }
    keys = ("model", "algorithm.options", 'algorithm.terms."mine:held"', "data.partition.options")
    experiment, _ = load_experiment(source, [f"{key}.kind=b" for key in keys], {})
    assert (experiment.model.name, experiment.model.options) == ("mine:Net", {"kind": "b", "width": 8})
    assert experiment.algorithm.options == {"kind": "b", "mu": 0.5}
    assert experiment.algorithm.terms == {"mine:held": {"kind": "b", "width": 3}}
    assert experiment.data.partition.model_dump() == partition | {"options": {"kind": "b", "size": 2}}


def test_the_name_that_a_table_has_by_default_takes_no_options_away() -> None:
    source = {"model": {"hidden": [128]}, "algorithm": {"options": {"mu": 1}}}
    named, _ = load_experiment(source, ["model.name=mlp", "algorithm.name=fedavg"], {})
    assert named == load_experiment(source, [], {})[0]
    other, _ = load_experiment(source, ["model.name=lenet", "algorithm.name=moon"], {})
    assert (other.model.options, other.algorithm.options) == ({}, {})


@pytest.mark.parametrize("quoted", ['"mine.py:held"', "'mine.py:held'", "mine:held"])
def test_a_part_of_an_overrides_key_may_be_quoted_as_in_toml(quoted: str) -> None:
    overrides = [f"algorithm.terms.{quoted}.width=2", "algorithm . loss=wsm"]
    algorithm = load_experiment("digits", overrides, {})[0].algorithm
    assert (algorithm.loss, algorithm.terms) == ("wsm", {quoted.strip("\"'"): {"width": 2}})


def test_participation_and_per_round_displace_each_other_across_sources() -> None:
    assert load_experiment("digits", ["fleet.participation=0.5"], {})[0].fleet.per_round == 150
    assert load_experiment({"fleet": {"participation": 0.5}}, ["fleet.per_round=7"], {})[0].fleet.per_round == 7
    with pytest.raises(ConfigurationError, match="say the same thing twice"):
        load_experiment("digits", ["fleet.participation=0.5", "fleet.per_round=7"], {})


def test_folders_in_the_environment_are_not_settings() -> None:
    environment = {"FEDEMU_DATA": "/x", "FEDEMU_CACHE": "/y", "FEDEMU_STATE": "/z", "HOME": "/h"}
    assert load_experiment("digits", [], environment)[0] == load_experiment("digits", [], {})[0]


# What is refused


def test_bad_overrides_and_variables_are_named() -> None:
    assert refused("digits", "local.lr") == '"local.lr" is no override; write section.key=value, as in local.lr=0.05'
    assert refused("digits", ".lr=1") == '".lr=1" is no override; write section.key=value, as in local.lr=0.05'
    assert refused("digits", '"".x=1') == '""".x=1" is no override; write section.key=value, as in local.lr=0.05'
    assert refused("digits", '"seed=1') == '"seed is no setting; did you mean seed?'
    assert refused("digits", "model.hidden=[1") == (
        "model.hidden = [1 is not a TOML value; check its brackets and quotes"
    )
    assert (
        refused("digits", "seed=1", "seed.x=2")
        == '"seed.x=2" sets a key inside seed, which is also set to a single value'
    )
    assert refused("digits", "local.lrr=1") == "local.lrr is no setting; did you mean local.lr?"
    assert refused("digits", "runtime=1") == "runtime = 1 must be a table"
    assert refused("digits", FEDEMU_LOCALE__LR="1") == (
        "the environment variable FEDEMU_LOCALE__LR names no setting and no folder; did you mean FEDEMU_LOCAL__LR?"
    )
    for name, meant in (
        ("FEDEMU_DATTA", "FEDEMU_DATA"),
        ("FEDEMU_CASHE", "FEDEMU_CACHE"),
        ("FEDEMU_LR", "FEDEMU_LOCAL__LR"),
        ("FEDEMU_LOCAL_LR", "FEDEMU_LOCAL__LR"),
        ("FEDEMU_PER_ROUND", "FEDEMU_FLEET__PER_ROUND"),
        ("FEDEMU_SEEED", "FEDEMU_SEED"),
    ):
        assert refused("digits", **{name: "1"}).endswith(f"no setting and no folder; did you mean {meant}?")
    assert "did you mean" not in refused("digits", FEDEMU_ZEBRA="1")
    assert refused("digits", FEDEMU_LOCAL__LR="fast") == (
        'local.lr = "fast" must be a number from 1e-38 to 1e+38 (set by the environment variable FEDEMU_LOCAL__LR)'
    )
    assert refused("digits", FEDEMU_LOCAL__LRR="1") == (
        "local.lrr is no setting; did you mean local.lr? (set by the environment variable FEDEMU_LOCAL__LRR)"
    )
    said = 'local.lr = "slow" must be a number from 1e-38 to 1e+38'
    assert refused("digits", "local.lr=slow", FEDEMU_LOCAL__LR="0.1") == said


def test_a_source_that_is_not_there_names_near_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("digit") == 'there is no file and no preset "digit"; did you mean digits?'
    assert refused("digits.tml").startswith('there is no file and no preset "digits.tml"; did you mean digits')
    assert refused("xyzzy").startswith('there is no file and no preset "xyzzy"; `fedemu presets` lists them')
    assert refused("a/b.toml") == "there is no file a/b.toml; there is no such folder"
    assert refused("mine.toml") == "there is no file mine.toml; `fedemu init mine.toml` writes one to start from"
    assert refused("digitz.toml") == "there is no file digitz.toml; did you mean digits?"
    (tmp_path / "mine.toml").write_text("")
    assert refused("mine.toml+ewcc") == 'there is no method "ewcc" to follow a preset after "+"; did you mean ewc?'
    assert refused("mine2.toml") == "there is no file mine2.toml; did you mean mine.toml?"
    (tmp_path / "folder").mkdir()
    assert refused("folder") == "folder is a folder, not an experiment's file"
    (tmp_path / "folder" / "config.toml").touch()
    assert refused("folder") == "folder is a folder; name folder/config.toml, or go on with --resume folder"


def test_parts_may_follow_a_file_as_they_follow_a_preset(tmp_path: Path) -> None:
    folder = tmp_path / "a+b"  # the joint may be a part of the path, too
    folder.mkdir()
    (folder / "mine.toml").write_text(preset_path("digits").read_text().replace('name = "digits"', 'name = "mine"'))
    (folder / "traced.toml").write_text('[availability]\nkind = "trace"\nfile = "phones.csv"\n')
    (folder / "phones.csv").write_text("device_id,start_s,end_s\na,0,10\n")
    for parts in ("scaffold", "fedprox+wsm"):
        ours, _ = load_experiment(folder / f"mine.toml+{parts}", (), {})
        shipped, _ = load_experiment(f"digits+{parts}", (), {})
        assert ours.name == f"mine-{parts.replace('+', '-')}"
        assert ours.model_copy(update={"name": shipped.name}) == shipped
    beside, _ = load_experiment(f"{folder}/traced.toml+wsm", (), {})
    assert (beside.name, beside.traces.last_event) == ("experiment-wsm", 10.0)


def test_a_preset_goes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert load_experiment("digits", [], {})[0].name == "digits"


@pytest.mark.usefixtures("uncollected")
def test_a_file_that_is_not_toml_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[local\nlr = 1")
    assert refused(path).startswith(f"{path} is not valid TOML: ")
    assert "line 1" in refused(path)
    no_value = (
        "this is no value; text needs quotation marks, a number begins with a digit, and truths are true and false"
    )
    for text, said in (
        ("rounds = 1\nrounds = 2\n", "a key is set twice, at line 2, column 11"),
        ("[local]\nlr = 1\n[local]\n", "the table [local] is there twice, at line 3, column 7"),
        ("rounds: 3", "a line must be a [table] or key = value, at line 1, column 7"),
        ("name = mine", f"{no_value}, at line 1, column 8"),
        ("[runtime]\nreport = True", f"{no_value}, at line 2, column 10"),
        ("[model]\nhidden = [64,\n", "a value, a bracket or a quotation mark is missing, at end of document"),
        (
            'name = "mine\n',
            "a text must end on its line, with the quotation mark with which it begins, at line 1, column 13",
        ),
    ):
        path.write_text(text)
        assert refused(path) == f"{path} is not valid TOML: {said}"
    path.write_text(f"seed = 1{'0' * 5000}")
    assert refused(path) == f"{path} holds a number of too many digits; write a smaller one"
    path.write_text(f"a = {'[' * 3000}")
    assert refused(path) == f"{path} is no experiment: its lists or tables are nested too deep"
    path.write_bytes(b"\xef\xbb\xbfrounds = 3\r\n[local]\r\nlr = 0.5\r\n")
    assert load_experiment(path, [], {})[0].local.lr == 0.5
    path.write_bytes(b"\xff\xfe")
    assert refused(path) == f"{path} is no TOML file: it is not text in UTF-8; save it as UTF-8"


# Presets


def test_every_preset_has_a_description_and_the_default_is_first() -> None:
    found = presets()
    assert found[0][0] == "digits"
    assert {name for name, _ in found} >= {"digits", "digits-small", "mnist-cnn", "cifar10-cnn", "phones", "churn"}
    assert all(len(description) > 20 for _, description in found)
    assert all(preset_path(name).read_text().startswith(f"# {description}\n") for name, description in found)


@pytest.mark.parametrize("name", [name for name, _ in presets()])
def test_every_preset_is_called_by_its_name_and_comes_back_from_a_run_directory(
    name: str, tmp_path: Path, traces: Path
) -> None:
    experiment, _ = load_experiment(name, [], {"FEDEMU_DATA": str(traces)})
    assert experiment.name == name
    assert Experiment.from_bytes(experiment.to_bytes()) == experiment
    shutil.rmtree(traces)
    directory = tmp_path / "run"
    directory.mkdir()
    write_frozen(experiment, directory)
    assert read_frozen(directory) == experiment
    assert read_frozen(directory).digest == experiment.digest
    expected = {"config.toml", "traces.json"} if name == "phones" else {"config.toml"}
    assert {path.name for path in directory.iterdir()} == expected


def test_the_default_preset_is_the_experiment_of_the_documentation() -> None:
    experiment, _ = load_experiment(None, [], {})
    assert (experiment.seed, experiment.rounds) == (1, 40)
    assert experiment.data.partition.model_dump() == {
        "kind": "dirichlet",
        "alpha": 0.1,
        "min_samples": 1,
        "balanced": False,
        "retry": False,
    }
    fleet = experiment.fleet
    assert (fleet.devices, fleet.per_round, fleet.over_selection, fleet.deadline) == (300, 30, 1.3, 600.0)
    assert experiment.faults.crash_rate == 0.02


# Trace files


def test_a_preset_that_lacks_its_files_says_which_and_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("phones") == (
        f'availability.file = "devices/availability_flash300.csv.gz" is not there: looked in {tmp_path}; '
        "set FEDEMU_DATA to the folder that holds it"
    )
    assert refused("phones", FEDEMU_DATA="/nowhere") == (
        f'availability.file = "devices/availability_flash300.csv.gz" is not there: looked in {tmp_path} and /nowhere'
    )


def test_files_are_looked_for_beside_the_toml_first(tmp_path: Path, traces: Path) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "trace.csv").write_text("device,start,end\na,1,2\n")
    (traces / "trace.csv").write_text("device,start,end\na,3,4\n")
    path = tmp_path / "near" / "mine.toml"
    path.write_text('[availability]\nkind = "trace"\nfile = "trace.csv"\n')
    environment = {"FEDEMU_DATA": str(traces)}
    assert load_experiment(path, [], environment)[0].traces.availability == ((1.0, 2.0),)
    (tmp_path / "near" / "trace.csv").unlink()
    assert load_experiment(path, [], environment)[0].traces.availability == ((3.0, 4.0),)


def test_a_trace_file_may_be_named_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "trace.csv").write_text("device,start,end\na,1,2\n")
    named = ["availability={kind='trace',file='~/trace.csv'}"]
    assert load_experiment("digits", named, {})[0].traces.availability == ((1.0, 2.0),)


def test_the_content_of_trace_files_travels_with_the_experiment(traces: Path) -> None:
    experiment, _ = load_experiment("phones", [], {"FEDEMU_DATA": str(traces)})
    assert experiment.traces.availability == ((1000.0, 4000.0), (500.0, 9000.0), (), (6000.0,))
    assert experiment.traces.last_event == 9000.0
    assert experiment.traces.profile["seconds_per_sample"].values == pytest.approx((2.0, 1.0, 0.5))
    assert experiment.traces.profile["down_kbps"].values == (8000.0, 800.0)
    assert experiment.traces.profile["up_kbps"].deviations == (400.0, 0.0)
    shutil.rmtree(traces)
    open_behaviour = open_behaviours(experiment.to_bytes())
    assert open_behaviour(0).presence(9000.0) == ((1000.0, 4000.0),)
    assert open_behaviour(0).presence(11000.0) == ((1000.0, 4000.0), (10000.0, 13000.0))
    assert open_behaviour(2).presence(1e6) == ()
    assert open_behaviour(3).presence(9000.0) == ((6000.0, 9000.0),)


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDEMU_DATA", "/nowhere")) / "devices" / "availability_flash300.csv.gz").is_file(),
    reason="FEDEMU_DATA names no folder with devices/availability_flash300.csv.gz",
)
def test_the_real_phones_are_on_line_as_their_description_says() -> None:
    experiment, _ = load_experiment("phones", [], os.environ)
    open_behaviour = open_behaviours(experiment.to_bytes())
    period = experiment.traces.last_event
    online = [sum(min(end, period) - start for start, end in open_behaviour(d).presence(period)) for d in range(300)]
    assert sum(hours > 0 for hours in online) == 297
    assert statistics.median(hours for hours in online if hours) / 3600 == pytest.approx(18.2, abs=0.5)
    assert period / 3600 == pytest.approx(149, abs=1)
    speeds = sorted(open_behaviour(device).profile.down_kbps for device in range(300))
    assert (speeds[0], speeds[-1]) == pytest.approx((2370.212 * 8, 17332.682 * 8))


def test_a_changed_trace_makes_another_experiment_and_a_copied_one_does_not(tmp_path: Path, traces: Path) -> None:
    environment = {"FEDEMU_DATA": str(traces)}
    digest = load_experiment("phones", [], environment)[0].digest
    shutil.copytree(traces, tmp_path / "copy")
    assert load_experiment("phones", [], {"FEDEMU_DATA": str(tmp_path / "copy")})[0].digest == digest
    (traces / "devices" / "network_flash.csv").write_text(NETWORK.replace("1000", "2000"))
    assert load_experiment("phones", [], environment)[0].digest != digest


def test_a_frozen_trace_counts_only_for_the_settings_that_it_was_read_with(tmp_path: Path, traces: Path) -> None:
    environment = {"FEDEMU_DATA": str(traces)}
    write_frozen(load_experiment("phones", [], environment)[0], tmp_path)
    other = ["availability.policy=battery50"]
    changed, _ = load_experiment(tmp_path / "config.toml", other, environment)
    assert changed.traces.availability == ((), (500.0, 9000.0), (), ())
    (tmp_path / "traces.json").write_text('{"of": {}')
    assert refused(tmp_path / "config.toml").startswith(f"{tmp_path / 'traces.json'} is damaged; ")


def test_a_file_called_like_frozen_traces_counts_only_beside_the_settings_of_a_run(
    tmp_path: Path, traces: Path
) -> None:
    environment = {"FEDEMU_DATA": str(traces)}
    write_frozen(load_experiment("phones", [], environment)[0], tmp_path)
    (tmp_path / "config.toml").rename(tmp_path / "mine.toml")
    (traces / "devices" / "network_flash.csv").write_text(NETWORK.replace("1000", "2000"))
    read_anew = load_experiment(tmp_path / "mine.toml", [], environment)[0]
    assert read_anew.traces.profile["down_kbps"].values == (16000.0, 800.0)
    (tmp_path / "traces.json").write_text("[1, 2, 3]")
    assert load_experiment(tmp_path / "mine.toml", [], environment)[0] == read_anew


def test_a_fleet_that_is_larger_than_its_trace_uses_each_phone_again_at_another_time(traces: Path) -> None:
    experiment, _ = load_experiment("phones", [], {"FEDEMU_DATA": str(traces)})
    open_behaviour = open_behaviours(experiment.to_bytes())
    first, again = open_behaviour(0).presence(1e5), open_behaviour(4).presence(1e5)
    assert first != again
    # Away from the edges the same spells of 3,000 s every 9,000 s.
    assert {round(end - start) for start, end in again[1:]} == {3000}


def test_devices_that_a_trace_never_sees_leave_are_always_on_line(tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("device,start,end\na,0,\nb,0,\n")
    table = {"availability": {"kind": "trace", "file": "all.csv", "at_end": "wrap"}}
    experiment, _ = load_experiment(table, [], {"FEDEMU_DATA": str(tmp_path)})
    open_behaviour = open_behaviours(experiment.to_bytes())
    assert [open_behaviour(device).presence(1e6) for device in range(3)] == [((0.0, math.inf),)] * 3


def test_an_experiment_that_lacks_its_traces_has_no_behaviours() -> None:
    bare = Experiment.parse({"availability": {"kind": "trace", "file": "x.csv"}})
    with pytest.raises(ConfigurationError, match="names trace files, but does not contain them"):
        open_behaviours(bare.to_bytes())


def test_behaviours_are_the_same_in_every_process_that_opens_them() -> None:
    experiment = load_experiment("churn", [], {})[0].to_bytes()
    work = Assignment(AskId(4, 0, 0), 900.0, 20_000, 20_000, 30.0)
    once, again = open_behaviours(experiment), open_behaviours(experiment)
    schedules = [once(device).schedule(work) for device in range(300)]
    assert schedules == [again(device).schedule(work) for device in reversed(range(300))][::-1]
    assert {schedule.cause for schedule in schedules} >= {None, "offline", "crash", "leave"}
    assert {schedule.reply for schedule in schedules} == {"normal", "corrupt", "duplicate", "decline"}


@pytest.mark.parametrize("kind", ["always", "exponential", "weibull", "diurnal"])
def test_every_kind_of_availability_opens(kind: str) -> None:
    experiment = Experiment.parse(
        {"availability": {"kind": kind}, "faults": {"downtime": {"kind": "fixed", "value": 3}}}
    )
    presences = {open_behaviours(experiment.to_bytes())(device).presence(1e6) for device in range(5)}
    assert len(presences) == (1 if kind == "always" else 5)


# Resuming


def test_a_resumed_run_may_have_more_rounds_and_another_machine() -> None:
    frozen, _ = load_experiment("digits", [], {})
    experiment, runtime = check_resume(
        frozen, ["rounds=60", "runtime.trainers=3"], {"FEDEMU_RUNTIME__PER_PROCESS": "4"}
    )
    assert experiment == frozen.model_copy(update={"rounds": 60})
    assert (runtime.trainers, runtime.per_process) == (3, 4)
    assert check_resume(frozen, [], {})[0] == frozen


def test_a_resumed_run_keeps_its_traces(traces: Path) -> None:
    frozen, _ = load_experiment("phones", [], {"FEDEMU_DATA": str(traces)})
    shutil.rmtree(traces)
    assert check_resume(frozen, ["rounds=40"], {})[0].digest == frozen.digest


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("local.lr=0.2", "local.lr can't change from 0.1 to 0.2 when a run is resumed: only rounds may grow; "),
        ("rounds=39", "rounds can't shrink from 40 to 39 when a run is resumed; only more rounds are possible"),
        ("model.hidden=[32]", "model.hidden can't change from [64] to [32] when a run is resumed"),
        ("availability.kind=always", 'availability.kind can\'t change from "exponential" to "always" when'),
        ("model.depth=3", "model.depth can't change from nothing to 3 when a run is resumed"),
    ],
)
def test_a_resumed_run_keeps_its_science(override: str, sentence: str) -> None:
    frozen, _ = load_experiment("digits", [], {})
    with pytest.raises(ConfigurationError) as caught:
        check_resume(frozen, [override], {})
    assert str(caught.value).startswith(sentence)


def test_a_folder_without_a_configuration_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"is no run directory: it has no config\.toml"):
        read_frozen(tmp_path)
