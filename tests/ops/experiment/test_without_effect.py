"""Settings that have no effect are told to whoever has set them, and to nobody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.mistakes import setting_paths
from fedemu.ops.experiment.presets import example_of, names_in, part_names, preset, preset_names
from fedemu.ops.experiment.sources import load_experiment, machine_paths
from fedemu.ops.experiment.without_effect import _REASONS, WithoutEffect
from fedemu.ops.sweeps.plan import SWEEPS, load_sweep, planned

Source = str | Path | Mapping[str, Any]


def told(source: Source, *overrides: str, environment: Mapping[str, str] | None = None) -> list[str]:
    return told_of([(source, overrides)], environment or {})


def told_of(runs: Sequence[tuple[Source, Sequence[str]]], environment: Mapping[str, str]) -> list[str]:
    without_effect, said = WithoutEffect(), list[str]()
    for source, overrides in runs:
        load_experiment(source, overrides, environment, without_effect)
    without_effect.tell(said.append)
    return said


NOTHING_KEPT = 'replay.strategy = "none" keeps no samples'
NOT_PUBLIC = "data.public.fraction = 0.0 makes no data public"
ONE_PERIOD = "it remembers periods that are over, and the stream has only one; set stream.kind"
AT_THE_COORDINATOR = 'algorithm.name = "central" trains at the coordinator alone, as its own options say'
UNTRAINED = 'algorithm.name = "ncm" trains nothing without algorithm.options.warm_up'
IN_MEMORY = 'runtime.transport = "memory" runs everything in one process'
IN_ONE_PROCESS = {"runtime": {"transport": "memory"}}
KEEPS_ITS_OWN = {"stream": {"kind": "drift"}, "replay": {"strategy": "own", "capacity": 9}}
REPLAY = "digits-tasks+uniform-replay"


@pytest.mark.parametrize(
    ("source", "setting", "why", "needed"),
    [
        ("digits", "data.public.imbalance = 3.0", NOT_PUBLIC, ["data.public.fraction=0.1"]),
        ("digits", "data.public.validation = 0.5", NOT_PUBLIC, ["data.public.fraction=0.1"]),
        (
            "digits",
            "data.text.length = 16",
            'data.text.kind = "none" says that the data are no texts',
            ["data.text.kind=next"],
        ),
        (
            "digits-tasks",
            "data.partition.retry = true",
            "data.partition.min_samples = 0 is always met",
            ["data.partition.min_samples=1"],
        ),
        (
            "digits",
            "local.lr_restart = true",
            "the stream has only one period",
            ["stream.kind=drift", "local.lr_decay=0.9"],
        ),
        (
            "digits-tasks",
            "local.lr_restart = true",
            "local.lr_decay = 1.0 leaves the learning rate as it is",
            ["local.lr_decay=0.9"],
        ),
        ("digits+public+central", "local.lr = 0.5", AT_THE_COORDINATOR, ["algorithm.name=fedavg"]),
        ("digits+public+central", "local.epochs = 3", AT_THE_COORDINATOR, ["algorithm.name=fedavg"]),
        (
            "digits-tasks+public+central",
            "local.lr_restart = true",
            AT_THE_COORDINATOR,
            ["algorithm.name=fedavg", "local.lr_decay=0.9"],
        ),
        ("digits+ncm", 'algorithm.loss = "wsm"', UNTRAINED, ["algorithm.options.warm_up=3"]),
        ("digits+ncm", "local.momentum = 0.5", UNTRAINED, ["algorithm.options.warm_up=3"]),
        ("digits+ncm-random", "local.steps = 4", UNTRAINED, ["algorithm.name=fedavg", "algorithm.options={}"]),
        ("digits-tasks", "replay.capacity = 500", NOTHING_KEPT, ["replay.strategy=reservoir"]),
        ("digits-tasks", "replay.census = false", NOTHING_KEPT, ["replay.strategy=herding", "replay.capacity=9"]),
        (
            "digits-tasks",
            "replay.proportion = 0.9",
            NOTHING_KEPT,
            ["replay.strategy=fixed_proportion", "replay.capacity=9"],
        ),
        (
            REPLAY,
            "replay.proportion = 0.9",
            'it is for replay.strategy = "fixed_proportion"',
            ["replay.strategy=fixed_proportion"],
        ),
        (
            REPLAY,
            "replay.restarts = 1",
            'it is for replay.strategy = "diversity" or "coordinated"',
            ["replay.strategy=diversity"],
        ),
        (
            KEEPS_ITS_OWN,
            'replay.objective = "always"',
            'replay.strategy = "own" leaves all questions to the method',
            ["replay.strategy=herding"],
        ),
        (
            REPLAY,
            'replay.targets = "each"',
            'it is for replay.strategy = "coordinated"',
            ["replay.strategy=coordinated"],
        ),
        (
            "digits",
            'faults.corruptions = ["nan"]',
            "faults.corrupt_rate = 0.0 damages no reply",
            ["faults.corrupt_rate=0.1"],
        ),
        (
            {"name": "mine"},
            'faults.downtime = { kind = "fixed", value = 3.0 }',
            "the rates of crashes, leaves and silences in [faults] are 0",
            ["faults.leave_rate=0.1"],
        ),
        (
            "digits",
            "evaluate.full_every = 3",
            "evaluate.samples = 0 evaluates every time on all test samples",
            ["evaluate.samples=50"],
        ),
        ("digits", "diagnose.samples = 30", "diagnose.every = 0 diagnoses no round", ["diagnose.every=2"]),
        (
            "digits",
            'runtime.metrics_address = "::1"',
            "runtime.metrics_port = 0 serves no metrics",
            ["runtime.metrics_port=9000"],
        ),
        ("digits", "runtime.nodes = 2", "runtime.on names no engine", ["runtime.on=ray"]),
        (IN_ONE_PROCESS, "tree.edges = [2]", IN_MEMORY, ["runtime.transport=zmq"]),
        (IN_ONE_PROCESS, 'fleet.link = "shared"', IN_MEMORY, ["runtime.transport=zmq"]),
        (IN_ONE_PROCESS, 'runtime.bind = "tcp://127.0.0.1:5578"', IN_MEMORY, ["runtime.transport=zmq"]),
        (IN_ONE_PROCESS, "runtime.trainers = 2", IN_MEMORY, ["runtime.transport=zmq"]),
        (IN_ONE_PROCESS, "runtime.per_process = 5", IN_MEMORY, ["runtime.transport=zmq"]),
        (IN_ONE_PROCESS, "runtime.lost_seconds = 600.0", IN_MEMORY, ["runtime.transport=zmq"]),
        ("digits", 'track.out = "there"', "track.to names no tracker", ["track.to=mlflow"]),
    ],
)
def test_a_setting_that_needs_another_is_told_without_it(
    source: Source, setting: str, why: str, needed: Sequence[str]
) -> None:
    assert told(source, setting) == [f"warning: {setting} has no effect, because {why}"]
    assert told(source, setting, *needed) == []


def test_a_stack_is_told_where_devices_are_computed_one_after_another() -> None:
    assert told("digits", "local.stack=4", "local.executor=serial") == [
        "warning: local.stack = 4 has no effect, because local.executor computes devices one after another"
    ]
    assert told("digits", "local.stack=4") == told("digits", "local.executor=serial") == []


def test_a_loss_that_the_method_refuses_is_not_told() -> None:
    assert told("digits+public+central", "algorithm.loss=wsm") == []


def test_what_places_devices_on_nodes_is_told_where_everything_is_one_process() -> None:
    assert told(IN_ONE_PROCESS, "runtime.on=ray", "runtime.nodes=2") == [
        f'warning: runtime.on = "ray" has no effect, because {IN_MEMORY}',
        f"warning: runtime.nodes = 2 has no effect, because {IN_MEMORY}",
    ]


def test_epochs_are_told_beside_steps() -> None:
    why = "local.steps counts in its place"
    assert told("digits", "local.epochs=2", "local.steps=9") == [
        f"warning: local.epochs = 2 has no effect, because {why}"
    ]
    assert told("digits", "local.epochs=2") == told("digits", "local.steps=9") == []


def test_a_strategy_that_solves_another_problem_has_no_random_beginning() -> None:
    assert told(f"{REPLAY.partition('+')[0]}+coordinated-replay", "replay.restarts=1", "replay.final=convex") == [
        'warning: replay.restarts = 1 has no effect, because replay.final = "convex" has no random beginning'
    ]


def test_terms_without_a_period_to_remember_are_told_and_terms_of_ones_own_are_not() -> None:
    terms = ("algorithm.terms.ewc.coefficient=1.0", "algorithm.terms.lwf.temperature=1.0")
    expected = [f"warning: algorithm.terms.{name} has no effect, because {ONE_PERIOD}" for name in ("ewc", "lwf")]
    assert told("digits", *terms, 'algorithm.terms."mine.py:held".width=2') == expected
    assert told("digits+ewc+lwf") == expected
    assert told("digits+ewc", "stream.kind=drift") == told("digits+ewc", "algorithm.terms={}") == []


def test_what_a_file_and_the_environment_set_is_told_and_what_a_preset_or_nobody_sets_is_not(tmp_path: Path) -> None:
    line = f"warning: replay.capacity = 20 has no effect, because {NOTHING_KEPT}"
    file = tmp_path / "mine.toml"
    file.write_text("[replay]\ncapacity = 20\nproportion = 0.5\n")
    assert told(file) == told({"replay": {"capacity": 20}}) == [line]
    assert told("digits", environment={"FEDEMU_REPLAY__CAPACITY": "20"}) == [line]
    assert told(REPLAY, "replay.strategy=none") == [line]
    assert told("digits-tasks", "replay.capacity=0", "replay.proportion=0.5") == []
    assert told("digits", "faults.crash_rate=0.0", "fleet.devices=40") == []


def test_a_variable_that_stands_for_all_runs_of_a_machine_is_not_told() -> None:
    assert (
        told("digits", environment={"FEDEMU_TRACK__PROJECT": "thesis", "FEDEMU_RUNTIME__METRICS_ADDRESS": "::1"}) == []
    )


def test_several_experiments_are_told_once_and_only_of_what_has_no_effect_in_any() -> None:
    kept = ["replay.strategy=fixed_proportion", "replay.proportion=0.9", "replay.capacity=20"]
    runs = [("digits-tasks", [f"replay.capacity={capacity}", "replay.proportion=0.9"]) for capacity in (10, 20, 10)]
    assert told_of(runs, {}) == [
        f"warning: replay.capacity = 10, 20 has no effect, because {NOTHING_KEPT}",
        f"warning: replay.proportion = 0.9 has no effect, because {NOTHING_KEPT}",
    ]
    assert told_of([*runs, ("digits-tasks", kept)], {}) == []
    assert told_of([runs[0], (REPLAY, ["replay.proportion=0.9"])], {}) == [
        f"warning: replay.proportion = 0.9 has no effect, because {NOTHING_KEPT}, or it is for replay.strategy = "
        '"fixed_proportion"'
    ]


def test_nothing_that_is_shipped_sets_what_has_no_effect() -> None:
    data = {"phones"}  # these name recorded files
    presets: list[Source] = [preset(name) for name in preset_names() if name not in data]
    assert [line for source in [*presets, *map(example_of, part_names())] for line in told(source)] == []
    for name in names_in(SWEEPS):
        assert told_of([(run.experiment, run.overrides) for run in planned(load_sweep(name))], {}) == []


def test_the_keys_are_settings() -> None:
    paths = {*setting_paths(Experiment), *machine_paths()}
    assert {key.removesuffix(".*") for key in _REASONS} <= paths
