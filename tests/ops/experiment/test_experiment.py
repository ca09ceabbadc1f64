"""An experiment from its TOML: defaults, bytes, digest, and the settings that are refused."""

from __future__ import annotations

import os
import tomllib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.ops.experiment import Experiment, Fleet, Runtime, Traces
from fedemu.ops.experiment.toml_text import toml_text
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import digest_of
from fedemu.protocol.messages import BeatSeconds


def parse(text: str) -> Experiment:
    return Experiment.parse(tomllib.loads(text))


FULL = """
name = "full"
seed = 4294967295
[data]
dataset = "a/b"
id_column = "writer"
partition = { kind = "natural" }
[model]
name = "my_module:MyModel"
hidden = [64, 32]
norm = "group"
scale = 0.5
nested = { deep = [1, 2.5, "x"], "odd key" = true }
[algorithm]
name = "fedprox"
options = { mu = 0.01, "quoted.key" = 'back\\slash "quote"' }
[local]
augment = ["crop", "flip"]
lr = 1
[availability]
kind = "diurnal"
[profile]
seconds_per_sample = { kind = "normal", mean = 0.01, std = 0.002 }
down_kbps = { kind = "uniform", low = 10, high = 20 }
up_kbps = { kind = "fixed", value = 5.0 }
latency = 0
[faults]
corruptions = ["nan"]
downtime = { kind = "lognormal", median = 60.0, sigma = 1.0 }
"""


@pytest.mark.parametrize("text", ["", FULL])
def test_an_experiment_comes_back_from_its_toml_and_its_bytes_as_it_was(text: str) -> None:
    experiment = parse(text)
    assert parse(experiment.to_toml()) == experiment
    assert Experiment.from_bytes(experiment.to_bytes()) == experiment
    assert parse(experiment.to_toml()).digest == experiment.digest == digest_of(experiment.to_bytes())


def test_every_default_is_written_out() -> None:
    written = tomllib.loads(Experiment().to_toml())
    assert set(written) == set(Experiment.model_fields) - {"traces", "code"}
    assert set(written["fleet"]) == set(Fleet.model_fields)
    assert written["availability"] == {"kind": "always"}
    assert written["profile"]["down_kbps"] == 20000.0


def test_the_bytes_are_canonical() -> None:
    one = parse("seed = 2\nrounds = 3\n[local]\nlr = 1\nmomentum = 0.5")
    other = parse("rounds = 3\nseed = 2\n[local]\nmomentum = 0.5\nlr = 1.0")
    assert one.to_bytes() == other.to_bytes()
    assert b" " not in parse('name = "x"').to_bytes()


def test_any_setting_and_any_trace_changes_the_digest() -> None:
    experiment = Experiment()
    digests = {experiment.digest, parse("seed = 2").digest, parse("[local]\nlr = 0.2").digest}
    digests.add(experiment.model_copy(update={"traces": Traces(availability=((0.0, 1.0),), last_event=1.0)}).digest)
    assert len(digests) == 4


def test_the_digest_of_the_defaults_is_what_it_has_been() -> None:
    # Changes when a setting or a default is added: then runs of before and after no longer count as one experiment.
    assert Experiment().digest == EXPECTED_DIGEST


EXPECTED_DIGEST = "7d9548e98e9afabf31a668a2cff82f5569e72ddf41dbad01963dce325365d49f"


def test_an_experiment_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Experiment().seed = 3  # type: ignore[misc]


def test_participation_is_another_way_to_say_per_round() -> None:
    assert parse("[fleet]\ndevices = 50\nparticipation = 0.1").fleet.per_round == 5
    assert parse("[fleet]\nparticipation = 0.001").fleet.per_round == 1
    assert parse("[fleet]\nparticipation = 1").fleet.per_round == 300


def test_a_natural_partition_takes_its_column_from_the_data() -> None:
    assert parse(FULL).data.partition.column == "writer"  # type: ignore[union-attr]
    explicit = '[data]\nid_column = "a"\npartition = { kind = "natural", column = "b" }'
    assert parse(explicit).data.partition.column == "b"  # type: ignore[union-attr]


def test_the_options_of_a_model_are_all_keys_but_its_name() -> None:
    assert parse(FULL).model.options == {
        "hidden": [64, 32],
        "norm": "group",
        "scale": 0.5,
        "nested": {"deep": [1, 2.5, "x"], "odd key": True},
    }
    assert Experiment().model.options == {"hidden": [64]}


LETTERS = "letters from a to z, digits, dots, dashes and underscores, and begin with a letter or digit, 100 at most"
REFUSED = {
    # Unknown keys: the nearest beside it, the same word elsewhere, or what there is.
    "[locl]\nlr = 1": "locl is no setting; did you mean local?",
    "[local]\nlrr = 1": "local.lrr is no setting; did you mean local.lr?",
    "[local]\nlearning_rate = 1": "local.learning_rate is no setting; did you mean local.lr?",
    "lr = 0.1": "lr is no setting; did you mean local.lr?",
    "local_lr = 1": "local_lr is no setting; did you mean local.lr, which is local__lr as a keyword of Python?",
    "learning_rate = 0.1": "learning_rate is no setting; did you mean local.lr?",
    "num_rounds = 3": "num_rounds is no setting; did you mean rounds?",
    "[fleet]\nclients_per_round = 3": "fleet.clients_per_round is no setting; did you mean fleet.per_round?",
    'method = "x"': "method is no setting; did you mean algorithm.name?",
    "[local]\nLR = 0.1": "local.LR is no setting; did you mean local.lr?",
    "[algorithm]\nmu = 1": "algorithm.mu is no setting; did you mean algorithm.options.mu?",
    "[algorithm]\nlambda = 1": "algorithm.lambda is no setting; did you mean algorithm.options.lambda?",
    "[fleet]\nrounds = 3": "fleet.rounds is no setting; did you mean rounds?",
    "[server]\nkind = 3": "server.kind is no setting; [server] has threads",
    'dataset = "x"': "dataset is no setting; did you mean data.dataset?",
    "[fleet]\nparticipaton = 0.1": "fleet.participaton is no setting; did you mean fleet.participation?",
    "[clock]\nzzz = 1": "clock.zzz is no setting; [clock] has kind",
    '[availability]\nkind = "exponential"\nmean_onlin = 3': (
        "availability.mean_onlin is no setting; did you mean availability.mean_online?"
    ),
    '[profile]\ndown_kbps = { kind = "trace", fil = "a" }': (
        "profile.down_kbps.fil is no setting; did you mean profile.down_kbps.file? (and 1 more)"
    ),
    # Wrong types and values out of range.
    "[local]\nlr = -1": "local.lr = -1 must be from 1e-38 to 1e+38",
    "[local]\nlr = 1e39": "local.lr = 1e+39 must be from 1e-38 to 1e+38",
    "[local]\nlr = 1e-60": "local.lr = 1e-60 must be from 1e-38 to 1e+38",
    '[local]\nlr = "a"': 'local.lr = "a" must be a number from 1e-38 to 1e+38',
    "[local]\nlr = true": "local.lr = true must be a number from 1e-38 to 1e+38",
    "[local]\nlr = inf": "local.lr = inf must be finite; write a large number instead",
    "[local]\nlr = 2020-01-01": "local.lr = 2020-01-01 is a date, which no setting takes",
    "[local]\nepochs = 2.5": "local.epochs = 2.5 must be a whole number of at least 1",
    '[local]\naugment = "flip"': (
        'local.augment = "flip" must be a list, as in ["flip"]; its values are any of crop, flip, cutout, mask'
    ),
    "[faults]\ncorruptions = []": (
        "faults.corruptions = [] must be a list that is not empty; its values are any of nan, shape, truncate"
    ),
    '[faults]\ncorruptions = ["x"]': 'faults.corruptions[0] = "x" is unknown; it must be one of nan, shape, truncate',
    "[local]\nlr = nan": "local.lr = nan must be finite; write a number",
    'clock = "wall"': 'clock = "wall" must be a table; write clock.kind = "wall"',
    'stream = "drift"': 'stream = "drift" must be a table; write stream.kind = "drift"',
    'model = "cnn"': 'model = "cnn" must be a table; write model.name = "cnn"',
    '[stream]\nkind = "classes"\norder = "label"': 'stream.order = "label" must be a list',
    '[local]\naugment = ["flipp"]': (
        'local.augment[0] = "flipp" is unknown; it must be one of crop, flip, cutout, mask; did you mean flip?'
    ),
    "local = 3": "local = 3 must be a table",
    "name = 3": "name = 3 must be text",
    'name = "a b"': 'name = "a b" must be made of ' + LETTERS,
    'name = "../x"': 'name = "../x" must be made of ' + LETTERS,
    "seed = -1": "seed = -1 must be at least 0 and below 4294967296",
    "rounds = 0": "rounds = 0 must be at least 1",
    '[data]\ndataset = ""': 'data.dataset = "" must not be empty',
    "[data]\npartition = 3": "data.partition = 3 must be a table whose kind is one of dirichlet, "
    "dirichlet_equal, shards, natural, iid, resampled, flwr",
    "[profile]\nlatency = { value = 1 }": (
        "profile.latency.kind is missing; it must be one of fixed, uniform, normal, lognormal"
    ),
    '[data]\npartition = { kind = "dirichlet", balanced = 1 }': "data.partition.balanced = 1 must be true or false",
    "[fleet]\nquorum = 1.5": "fleet.quorum = 1.5 must be above 0 and at most 1",
    "[fleet]\nquorum = 0": "fleet.quorum = 0 must be above 0 and at most 1",
    "[fleet]\nover_selection = 1e308": "fleet.over_selection = 1e+308 must be from 1 to 2147483647",
    "[fleet]\ndeadline = 0": "fleet.deadline = 0 must be above 0",
    "[profile]\nup_kbps = 0": "profile.up_kbps = 0 must be above 0",
    '[profile]\nup_kbps = "fast"': 'profile.up_kbps = "fast" must be a number above 0',
    "[profile]\nlatency = -1": "profile.latency = -1 must be at least 0",
    '[profile]\nlatency = { kind = "fixed", value = -1 }': "profile.latency.value = -1 must be at least 0",
    '[availability]\nkind = "diurnal"\nspell = 1e308': "availability.spell = 1e+308 must be from 0.1 to 1e+100",
    '[availability]\nkind = "diurnal"\nspread_hours = 1e308': (
        "availability.spread_hours = 1e+308 must be from 0 to 1e+100"
    ),
    '[availability]\nkind = "weibull"\nshape = 0.01': ("availability.shape = 0.01 must be from 0.1 to 100"),
    # Unknown kinds.
    '[availability]\nkind = "expo"': (
        'availability.kind = "expo" is unknown; it must be one of always, exponential, weibull, diurnal, trace'
    ),
    "[availability]\nmean_online = 3": (
        "availability.kind is missing; it must be one of always, exponential, weibull, diurnal, trace"
    ),
    '[availability]\nkind = "trace"': "availability.file is missing; the table it belongs to needs it",
    '[profile]\ndown_kbps = { kind = "lognorm" }': (
        'profile.down_kbps.kind = "lognorm" is unknown; it must be one of fixed, uniform, normal, lognormal, trace; '
        "did you mean lognormal?"
    ),
    '[stream]\nkind = "drifting"': (
        'stream.kind = "drifting" is unknown; it must be one of static, periods, drift, window, classes; '
        "did you mean drift?"
    ),
    '[stream]\nkind = "static"\nperiods = 3': (
        'stream.periods is no setting of every kind; stream.kind = "static" has no settings'
    ),
    '[stream]\nkind = "classes"\nperiods = 3': (
        'stream.periods is no setting of every kind; stream.kind = "classes" has period_seconds, arrivals, cumulative, '
        "tasks, rounds_per_task, order, order_by"
    ),
    '[stream]\nkind = "periods"\nperiods = 2\nrounds_per_period = 0': "stream.rounds_per_period = 0 must be at least 1",
    '[stream]\nkind = "periods"\nperiods = 0': "stream.periods = 0 must be at least 1",
    '[stream]\nkind = "periods"\nperiods = 2\nwidth = 3': (
        'stream.width is no setting of every kind; stream.kind = "periods" has period_seconds, arrivals, cumulative, '
        "periods, rounds_per_period, order, cut, test_fraction"
    ),
    '[stream]\nkind = "window"\nwidth = 0.5': "stream.width = 0.5 must be at least 1",
    '[replay]\nstrategy = "gss"': (
        'replay.strategy = "gss" is unknown; it must be one of none, naive_uniform, approximation_of_uniform, '
        "fixed_proportion, reservoir, class_balanced, herding, gss_greedy, gss_cluster, gss_iqp, diversity_convex, "
        "diversity, coordinated, fedcbdr, own; did you mean gss_iqp?"
    ),
    '[clock]\nkind = "real"': 'clock.kind = "real" is unknown; it must be one of virtual, wall',
    # Settings that do not fit together.
    '[stream]\nkind = "drift"\narrivals = "poisson"': (
        'stream.arrivals = "poisson" spreads samples over their period, which needs a length; set stream.period_seconds'
    ),
    '[stream]\nkind = "drift"\nperiod_seconds = 1e15': (
        "stream.period_seconds = 1000000000000000.0 makes 10 periods longer than 1e+08 seconds, for which devices "
        "can't tell when they are on-line; set a shorter one"
    ),
    '[stream]\nkind = "drift"\narrivals = "order"\nperiod_seconds = 60.0': (
        'stream.arrivals = "order" goes by the numbers that order the samples; set stream.kind = "periods"'
    ),
    '[stream]\nkind = "classes"\norder = [0, 1, 2, 1]': (
        "stream.order names class 1 more than once; name every class once, or none"
    ),
    '[replay]\nstrategy = "reservoir"': (
        'replay.strategy = "reservoir" has no room to keep samples in; '
        "set replay.capacity to the number of samples that a device can store"
    ),
    "[replay]\ncapacity = 3\nbudget = 4": (
        "replay.budget = 4 is more than replay.capacity = 3; lower the budget, or raise the capacity"
    ),
    '[replay]\nstrategy = "reservoir"\ncapacity = 3': (
        'replay.strategy = "reservoir" has nothing to replay in a stream of one period; '
        'set stream.kind and more periods, or replay.strategy = "none"'
    ),
    '[stream]\nkind = "drift"\ncumulative = true\n[replay]\nstrategy = "reservoir"\ncapacity = 3': (
        'replay.strategy = "reservoir" has nothing to replay where stream.cumulative = true keeps all samples; '
        'set stream.cumulative = false, or replay.strategy = "none"'
    ),
    "[fleet]\nper_round = 400": (
        "fleet.per_round = 400 is more than fleet.devices = 300; "
        "lower fleet.per_round, or set fleet.participation instead"
    ),
    '[fleet]\nwake = "on-demand"\n[clock]\nkind = "wall"': (
        'fleet.wake = "on-demand" needs clock.kind = "virtual"; under the wall clock a device that sleeps would count '
        "as off-line"
    ),
    '[data.text]\nkind = "next"\n[diagnose]\nevery = 2': (
        "diagnose.every tells what models forget of classes, but models of language data predict tokens; set it to 0"
    ),
    "[fleet]\nper_round = 3\nparticipation = 0.1": (
        "fleet.per_round and fleet.participation say the same thing twice; keep one of them"
    ),
    "[fleet]\nparticipation = 2": "fleet.participation = 2 must be a number above 0 and at most 1",
    '[data]\npartition = { kind = "natural" }': (
        'data.partition = { kind = "natural" } needs a column that tells devices apart; set data.id_column'
    ),
    "[faults]\ncrash_rate = 0.6\nleave_rate = 0.6": (
        "faults.crash_rate + faults.leave_rate + faults.silence_rate = 1.2 is more than 1, "
        "but at most one of them can happen to a device"
    ),
    '[availability]\nkind = "diurnal"\nmean = 0.7\namplitude = 0.5': (
        "availability.amplitude = 0.5 takes availability.mean = 0.7 out of 0 to 1; it may be at most 0.3"
    ),
    '[profile]\ndown_kbps = { kind = "uniform", low = 3, high = 2 }': (
        "profile.down_kbps: a uniform distribution needs low <= high, but has low = 3.0 and high = 2.0"
    ),
    '[profile]\ndown_kbps = { kind = "uniform", low = 0, high = 2 }': (
        "profile.down_kbps may come out as 0, but a device needs some bandwidth; raise its low end"
    ),
    '[profile]\nlatency = { kind = "normal", mean = 3, std = 1, high = 2 }': (
        "profile.latency: a truncated normal distribution needs low <= mean <= high, but has low = 0.0, mean = 3.0 and "
        "high = 2.0"
    ),
    '[faults]\ndowntime = { kind = "normal", mean = 3, std = 1, low = 3, high = 3 }': (
        "faults.downtime: a truncated normal distribution with std = 1.0 hardly ever gives a value from low = 3.0 to "
        "high = 3.0; lower std, or move low and high apart"
    ),
    "[local]\nstack = 1": "local.stack = 1 is no stack; write local.executor = 'serial'",
    "[local]\nweight_decay = 1e300": "local.weight_decay = 1e+300 must be from 0 to 1e+38",
    "[liveness]\nheartbeat_seconds = 1e12": (
        "liveness.heartbeat_seconds = 1000000000000.0 must be above 0 and at most 1000000000.0"
    ),
    "[traces]\nlast_event = 1": (
        "traces is no setting; it is filled from the files that availability and profile name"
    ),
    # Several at once.
    "[local]\nlr = -1\nepochs = 0\nmomentum = 2": ("local.epochs = 0 must be at least 1 (and 2 more)"),
}


@pytest.mark.parametrize(("text", "sentence"), REFUSED.items(), ids=lambda text: text.replace("\n", " ")[:60])
def test_wrong_settings_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 2.0),
        ({"most_per_second": 100}, 3.0),
        ({"heartbeat_seconds": 1e9}, 1e9),
        ({"heartbeat_seconds": 1e-5, "most_per_second": 2**31 - 1}, 0.001),
    ],
)
def test_every_interval_of_signs_of_life_can_travel_to_devices(settings: dict[str, Any], seconds: float) -> None:
    interval = parse(toml_text({"liveness": settings})).liveness.interval(300)
    assert interval == seconds
    msgspec.convert(interval, BeatSeconds)


@pytest.mark.parametrize(
    ("wake", "over_selection", "awake"),
    [("at-once", 1.5, 300), ("on-demand", 1.5, 45), ("on-demand", 30.0, 300)],
)
def test_no_more_devices_are_awake_than_there_are(wake: str, over_selection: float, awake: int) -> None:
    fleet = {"devices": 300, "per_round": 30, "over_selection": over_selection, "wake": wake}
    assert Experiment.parse({"fleet": fleet}).fleet.awake == awake


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"data": {"dataset": os.fsdecode(b"caf\xe9")}}, "data.dataset = 'caf\\udce9'"),
        ({"model": {os.fsdecode(b"caf\xe9"): 1}}, "the key 'caf\\udce9'"),
    ],
)
def test_a_text_that_is_no_utf_8_is_refused_by_name(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Experiment.parse(table)
    assert str(caught.value) == f"{said} is no UTF-8; choose another"


def test_the_settings_of_a_machine_are_checked_alike() -> None:
    assert Runtime.parse({}) == Runtime()
    for table, sentence in (
        ({"trainer": 2}, "runtime.trainer is no setting; did you mean runtime.trainers?"),
        ({"transport": "tcp"}, 'runtime.transport = "tcp" is unknown; it must be one of zmq, memory'),
        ({"metrics_port": 70000}, "runtime.metrics_port = 70000 must be from 0 to 65535"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            Runtime.parse(table)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("data", [b"", b"{}x", b"[]", b'{"seed": "a"}', b"\xff"])
def test_bytes_that_are_no_experiment_are_refused(data: bytes) -> None:
    with pytest.raises(
        ConfigurationError, match="not one that this version of fedemu understands; install the coordinator's version"
    ):
        Experiment.from_bytes(data)


values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "name"), values, max_size=4))
@settings(max_examples=50)
def test_any_options_survive_the_way_through_toml_and_bytes(options: dict[str, Any]) -> None:
    experiment = Experiment.parse({"model": {"name": "m", **options}, "algorithm": {"options": options}})
    assert experiment.model.options == experiment.algorithm.options == options
    assert parse(experiment.to_toml()) == experiment
    assert Experiment.from_bytes(experiment.to_bytes()) == experiment


def test_values_without_a_toml_form_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="has no TOML form"):
        toml_text({"a": [object()]})
