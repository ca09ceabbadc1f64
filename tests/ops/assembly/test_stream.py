"""From an experiment's configuration to who sees which sample when, and to what each period is tested on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.assembly.stream import class_tasks, open_stream
from fedemu.ops.data.corpora import source_of
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.ids import Digest

DEVICES = 8
LABELS = np.arange(400) % 10
TEST_LABELS = np.arange(100) % 10
TIMES = np.random.default_rng(0).permutation(400).astype(np.float64)
DOMAINS = np.array(["garden", "house"])


def split(labels: np.ndarray[Any, Any], **columns: np.ndarray[Any, Any]) -> Split:
    return Split(np.zeros((len(labels), 1, 2, 2), np.uint8), labels, columns)


CORPUS = Corpus(
    "tiny",
    split(LABELS, time=TIMES, domain=DOMAINS[LABELS % 2]),
    split(TEST_LABELS, domain=DOMAINS[TEST_LABELS % 2]),
    tuple("0123456789"),
    (1, 2, 2),
    np.zeros(1),
    np.ones(1),
    Digest("0" * 64),
)


def experiment(seed: int = 1, data: dict[str, Any] | None = None, **stream: Any) -> Experiment:
    table: dict[str, Any] = {
        "seed": seed,
        "data": {"dataset": "tiny:make", "partition": {"kind": "iid"}, **(data or {})},
        "fleet": {"devices": DEVICES, "per_round": 2},
    }
    return Experiment.parse(table | ({"stream": stream} if stream else {}))


def opened(wanted: Experiment) -> tuple[StreamPlan, PeriodTests]:
    partition = build_partition(CORPUS, wanted.data, devices=DEVICES, seed=wanted.seed)
    return open_stream(wanted, CORPUS, partition)


def part_of(tests: PeriodTests, period: int) -> np.ndarray[Any, Any]:
    return np.split(tests.indices, tests.offsets[1:-1])[period]


def test_a_static_stream_gives_every_device_its_samples_in_the_partitions_order() -> None:
    wanted = experiment(data={"validation": 0.25, "public": {"fraction": 0.1}})
    partition = build_partition(CORPUS, wanted.data, devices=DEVICES, seed=1)
    plan, tests = opened(wanted)
    for device in range(DEVICES):
        for round in (1, 7, 1000):
            assert plan.held(device, round, 0.0).tolist() == partition.device(device)[0].tolist()
    assert (plan.arrivals.period_count, plan.budget) == (1, 0)
    assert (tests.indices.tolist(), tests.held_out) == ([*range(100)], False)


KINDS: list[dict[str, Any]] = [
    {"kind": "periods", "periods": 4},
    {"kind": "periods", "periods": 4, "order": "time", "cut": "fleet"},
    {"kind": "drift", "periods": 4},
    {"kind": "drift", "periods": 4, "column": "domain", "arrivals": "poisson", "period_seconds": 60.0},
    {"kind": "periods", "periods": 4, "order": "time", "arrivals": "order", "period_seconds": 60.0},
    {"kind": "window", "periods": 4, "width": 1.0},
    {"kind": "classes", "tasks": 4},
]


@pytest.mark.parametrize("cut", ["fleet", "device"])
@pytest.mark.parametrize("stream", [{"kind": "drift", "alpha": 0.2}, {"kind": "window", "width": 2.0}])
def test_a_drift_is_cut_for_the_fleet_or_for_each_device(stream: dict[str, Any], cut: str) -> None:
    plan, _ = opened(experiment(**stream, periods=4, cut=cut))
    sizes = plan.arrivals.counts()
    assert sizes.sum(axis=0).tolist() == [100, 100, 100, 100] or cut == "device"
    assert (np.ptp(sizes, axis=1).max() <= 1) == (cut == "device"), "50 samples of a device are 12 or 13 in each period"


@pytest.mark.parametrize("stream", KINDS)
def test_validation_parts_and_public_data_never_arrive(stream: dict[str, Any]) -> None:
    wanted = experiment(data={"validation": 0.25, "public": {"fraction": 0.1}}, **stream)
    partition = build_partition(CORPUS, wanted.data, devices=DEVICES, seed=1)
    plan, tests = opened(wanted)
    held_out = tests.indices.tolist() if tests.held_out else []
    assert sorted([*plan.arrivals.indices.tolist(), *held_out]) == sorted(partition.train_indices.tolist())
    assert tests.held_out == (stream["kind"] == "periods")
    assert (len(tests), plan.arrivals.period_count) == (4, 4)


@pytest.mark.parametrize("stream", KINDS)
def test_a_stream_is_a_function_of_the_experiment_and_another_seed_makes_another(stream: dict[str, Any]) -> None:
    first, again, other = (opened(experiment(seed, **stream))[0].to_arrays() for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


def test_periods_follow_a_column_of_times() -> None:
    plan, tests = opened(experiment(kind="periods", periods=4, order="time", cut="fleet", test_fraction=0.25))
    ends = [TIMES[part_of(tests, period)].max() for period in range(4)]
    assert ends == [99.0, 199.0, 299.0, 399.0]
    assert [plan.arrivals.counts()[:, period].sum() for period in range(4)] == [75] * 4
    for period in range(4):
        arrived = plan.arrivals.indices[plan.arrivals.periods == period]
        assert TIMES[arrived].max() < TIMES[part_of(tests, period)].min()


def test_labels_are_an_order_of_arrival() -> None:
    plan, _ = opened(experiment(kind="periods", periods=2, order="label", cut="fleet"))
    for period, labels in enumerate(({0, 1, 2, 3, 4}, {5, 6, 7, 8, 9})):
        assert {*LABELS[plan.arrivals.indices[plan.arrivals.periods == period]]} <= labels


def test_the_order_of_the_training_split_is_an_order_of_arrival() -> None:
    plan, _ = opened(experiment(kind="periods", periods=4))
    for device in range(DEVICES):
        mine = plan.arrivals.everything(device, 3).tolist()
        assert mine == sorted(mine)


def test_devices_may_meet_tasks_in_orders_of_their_own_which_model_and_stream_share() -> None:
    wanted = experiment(kind="classes", tasks=5, order_by="device")
    plan, tests = opened(wanted)
    tasks = class_tasks(wanted, 10)
    assert tasks is not None
    assert tasks.own is not None
    assert tasks.own.shape == (DEVICES, 5)
    for device in range(DEVICES):
        for period in range(5):
            brought = np.unique(tasks.task[LABELS[plan.arrivals.arrived(device, period, np.inf)]])
            assert brought.tolist() == [tasks.own[device, period]]
    assert tests.since is not None
    assert tests.since.tolist() == tasks.since.tolist()
    assert [np.unique(tasks.task[TEST_LABELS[part_of(tests, task)]]).tolist() for task in range(5)] == [
        [task] for task in range(5)
    ]
    again = class_tasks(experiment(seed=2, kind="classes", tasks=5, order_by="device"), 10)
    assert again is not None
    assert again.own is not None
    assert again.own.tolist() != tasks.own.tolist()


def test_a_setting_that_came_later_does_not_change_the_digest_of_streams_of_classes() -> None:
    plain = experiment(kind="classes", tasks=5)
    assert "order_by" not in plain.table()["stream"]
    assert plain.digest == experiment(kind="classes", tasks=5, order_by="fleet").digest
    own = experiment(kind="classes", tasks=5, order_by="device")
    assert own.table()["stream"]["order_by"] == "device"
    assert Experiment.from_bytes(own.to_bytes()) == own


def test_classes_come_in_the_order_that_is_given() -> None:
    plan, tests = opened(experiment(kind="classes", tasks=2, order=[9, 8, 7, 6, 5, 0, 1, 2, 3, 4]))
    counts = plan.arrivals.label_counts(LABELS, 10)
    assert counts.tolist() == [[0] * 5 + [40] * 5, [40] * 5 + [0] * 5]
    assert sorted(set(TEST_LABELS[part_of(tests, 0)].tolist())) == [5, 6, 7, 8, 9]


def test_a_column_of_texts_drifts_like_labels() -> None:
    plan, tests = opened(experiment(kind="window", column="domain", periods=2, width=1.0))
    first = plan.arrivals.indices[plan.arrivals.periods == 0]
    assert len(set(LABELS[first] % 2)) == 1
    assert set(TEST_LABELS[part_of(tests, 0)] % 2) == set(LABELS[first] % 2)


def test_the_rules_of_a_plan_are_those_of_the_configuration() -> None:
    rules = {"rounds_per_period": 3, "period_seconds": 50.0, "periods": 4}
    plan, _ = opened(experiment(kind="drift", cumulative=True, **rules))
    assert (plan.rounds_per_period, plan.period_seconds, plan.cumulative, plan.budget) == (3, 50.0, True, 0)
    assert [plan.period_of(round) for round in (1, 3, 4, 12, 13)] == [0, 0, 1, 3, 3]
    plan, _ = opened(experiment(kind="classes", rounds_per_task=7))
    assert (plan.rounds_per_period, plan.arrivals.period_count) == (7, 5)


@pytest.mark.parametrize(
    ("replay", "kept"),
    [
        ({}, 0),
        ({"strategy": "none", "capacity": 9}, 0),
        ({"strategy": "reservoir", "capacity": 9}, 9),
        ({"strategy": "reservoir", "capacity": 9, "budget": 4}, 4),
    ],
)
def test_devices_keep_the_budget_or_else_all_their_capacity(replay: dict[str, Any], kept: int) -> None:
    table = experiment(kind="drift", periods=4).table() | {"replay": replay}
    wanted = Experiment.parse(table)
    assert (opened(wanted)[0].budget, opened(wanted)[0].alone, wanted.replay.kept) == (kept, kept, kept)


def test_devices_with_a_common_budget_keep_up_to_their_capacity_and_alone_the_budget() -> None:
    replay = {"strategy": "fedcbdr", "capacity": 9, "budget": 4}
    plan, _ = opened(Experiment.parse(experiment(kind="classes").table() | {"replay": replay}))
    assert (plan.budget, plan.alone) == (9, 4)


def test_poisson_arrivals_are_spread_over_the_period() -> None:
    plan, _ = opened(experiment(kind="drift", periods=4, arrivals="poisson", period_seconds=60.0))
    seconds = plan.arrivals.seconds
    assert 0.0 <= seconds.min() < 5.0
    assert 55.0 < seconds.max() < 60.0
    assert len(plan.held(0, 1, 0.0)) == 0


def test_samples_that_have_times_of_their_own_arrive_by_them() -> None:
    """A sample arrives in the period to which its time belongs, also at the first and the last moment of it."""
    plan, _ = opened(experiment(kind="periods", periods=4, order="time", arrivals="order", period_seconds=60.0))
    for device in range(DEVICES):
        arrived = plan.arrivals.everything(device, 3)
        assert TIMES[arrived].tolist() == sorted(TIMES[arrived])
        own = TIMES[plan.arrivals.arrived(device, 1, 60.0)]
        expected = 60.0 * (own - own[0]) / (own[-1] - own[0])
        mine = (plan.arrivals.owners() == device) & (plan.arrivals.periods == 1)
        assert plan.arrivals.seconds[mine].tolist() == pytest.approx(expected.tolist())


def test_the_columns_that_a_stream_reads_are_kept_with_the_data() -> None:
    for stream, columns in (
        ({"kind": "periods", "order": "time"}, ("time", "writer")),
        ({"kind": "periods", "order": "writer"}, ("writer",)),
        ({"kind": "periods", "order": "label"}, ("writer",)),
        ({"kind": "drift", "column": "domain"}, ("domain", "writer")),
        ({"kind": "window", "column": "label"}, ("writer",)),
        ({"kind": "classes"}, ("writer",)),
    ):
        wanted = experiment(data={"partition": {"kind": "natural", "column": "writer"}}, **stream)
        source = source_of(wanted.data, wanted.stream)
        assert (source.columns, source.order) == (columns, "time" if "time" in columns else None)


@pytest.mark.parametrize(
    ("stream", "sentence"),
    [
        (
            {"kind": "drift", "periods": 401},
            'stream.kind = "drift": 401 periods need at least one training sample each, but the devices hold 400; '
            "lower them",
        ),
        (
            {"kind": "classes", "tasks": 11},
            'stream.kind = "classes": stream.tasks = 11, but 10 classes make at least 1 task and at most 10',
        ),
        (
            {"kind": "classes", "order": [0, 1]},
            'stream.kind = "classes": the class order misses: 2, 3, 4, 5, 6, 7, 8, 9; '
            "stream.order must name each of the classes 0 to 9 once, or be empty",
        ),
        (
            {"kind": "periods", "order": "domain"},
            'stream.kind = "periods": the order column is of type <U6, but an order of arrival needs numbers; '
            "set stream.order to a column of numbers, such as seconds, or to 'index'",
        ),
    ],
)
def test_settings_that_make_no_stream_are_refused_in_one_sentence(stream: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        opened(experiment(**stream))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (
            "time",
            "stream.kind = \"drift\": the test split of the data set 'tiny' has no column 'time'; "
            "a function of your own returns it in 'test_columns'",
        ),
        (
            "place",
            "stream.kind = \"drift\": the training split of the data set 'tiny' has no column 'place'; "
            "a function of your own returns it in 'columns'",
        ),
    ],
)
def test_it_is_told_which_split_lacks_the_column_of_a_stream(column: str, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        opened(experiment(kind="drift", column=column))
    assert str(caught.value) == sentence


def test_the_zygote_knows_streams_and_plain_connections_without_what_hundreds_of_forks_would_copy() -> None:
    named = "{'torch', 'asyncio', 'zmq', 'fedemu.device.memory.stream', 'fedemu.protocol.transport.direct'}"
    imports = "import sys, fedemu.device.process.zygote, fedemu.ops.assembly.behaviours"
    code = f"{imports}; print(*sorted({named} & {{*sys.modules}}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "fedemu.device.memory.stream fedemu.protocol.transport.direct\n"
