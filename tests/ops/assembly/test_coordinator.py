"""What an experiment's settings make of the coordinator's plan."""

from pathlib import Path

import numpy as np
import pytest

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.coordinator.evaluation import threads
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.records import write_record
from fedemu.coordinator.settings import Settings
from fedemu.ops.assembly.coordinator import VERDICT_DELAY, assemble, settings_of
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.transport.memory import MemoryNetwork

pytestmark = pytest.mark.usefixtures("tried_here")


def plan_of(directory: Path, *settings: str) -> CoordinatorPlan:
    experiment, _ = load_experiment("digits-small", list(settings), {})
    return assemble(directory, experiment, MemoryNetwork(), "inproc://assembled")


RULES = {
    "name": "rules",
    "seed": 3,
    "rounds": 40,
    "fleet": {
        "devices": 50,
        "per_round": 7,
        "over_selection": 1.5,
        "deadline": 90.0,
        "quorum": 0.75,
        "attempts": 4,
        "start_timeout": 11.0,
        "give_up": 12.0,
        "answer_timeout": 13.0,
    },
    "clock": {"kind": "wall"},
    "evaluate": {"every": 2, "samples": 30, "full_every": 8},
    "diagnose": {"every": 5},
    "liveness": {"heartbeat_seconds": 0.5, "patience": 6, "most_per_second": 20},
    "faults": {"silence_rate": 0.1},
    "limits": {"max_payload_bytes": 10**6, "max_norm": 1e3},
    "stream": {"kind": "periods", "periods": 2},
    "replay": {"strategy": "reservoir", "capacity": 9},
    "server": {"threads": 2},
}


def test_the_rules_of_a_run_are_those_of_its_experiment() -> None:
    stream = StreamPlan(Arrivals(np.zeros(51, np.int64), *np.zeros((2, 0), np.int64), np.zeros(0), 1))
    rules = Settings(
        run="rules",
        seed=3,
        rounds=40,
        devices=50,
        per_round=7,
        over_selection=1.5,
        deadline=90.0,
        quorum=0.75,
        attempts=4,
        clock="wall",
        evaluate_every=2,
        evaluate_all_every=8,
        diagnose_every=5,
        task_of_round=stream.period_of,
        task_begins=stream.begins,
        heartbeat_seconds=2.5,  # 50 devices may send 20 in a second
        patience=6,
        planned_silence=2.5 * 7,
        start_timeout=11.0,
        verdict_delay=VERDICT_DELAY,
        give_up=12.0,
        answer_timeout=13.0,
        payload_bytes=10**6,
        max_norm=1e3,
        replay=True,
        threads=2,
    )
    assert settings_of(Experiment.parse(RULES), stream) == rules
    asleep = Experiment.parse({**RULES, "clock": {}, "fleet": {**RULES["fleet"], "wake": "on-demand"}})
    assert settings_of(asleep, stream).heartbeat_seconds == 11 / 20, "as many as are asked are awake"
    changes = {"evaluate": {"every": 2}, "faults": {}, "compute": {"portable": True}, "server": {"threads": 1}}
    other = settings_of(Experiment.parse({**RULES, **changes}), stream)
    assert (other.evaluate_all_every, other.planned_silence, other.portable) == (0, 0.0, True)


def test_a_resumed_run_computes_its_devices_as_it_began(tmp_path: Path) -> None:
    assert plan_of(tmp_path).executor == "auto"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_record(checkpoint, 1, {"format": 2, "record": {"compute": {}}})  # as earlier versions wrote it
    assert plan_of(tmp_path).executor == "auto"
    write_record(checkpoint, 2, {"format": 2, "record": {"compute": {"executor": "plain"}}})
    plan = plan_of(tmp_path)
    assert (plan.executor, Experiment.from_bytes(plan.experiment).local.executor) == ("plain", "plain")


def test_a_plan_has_the_parts_that_its_experiment_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    samples = ("evaluate.samples=50", "evaluate.validation=true", "data.validation=0.2", "data.public={fraction=0.1}")
    full = plan_of(tmp_path, *samples, "fleet.wake=on-demand", "server.threads=2")
    assert threads == [2, 1]  # the second one is for the trial, which happens here
    tested, held = vars(full.evaluator), decode_tree(full.partition)["indices"]
    assert sum(len(labels) for _, labels in tested["_part"]) == 50
    assert full.public is not None
    public = len(full.public.train.y) + len(full.public.validation.y)
    assert len(tested["_validation"]) == 1437 - public - len(held)
    assert isinstance(full.planned, PlannedTimes)
    assert full.holdings is not None
    assert (len(full.holdings.arrivals.indices), len(full.holdings.labels), full.holdings.classes) == (
        len(held),
        1437,
        10,
    )
    plain = plan_of(tmp_path, "data.validation=0.2")
    assert [vars(plain.evaluator)[part] for part in ("_part", "_validation")] == [None, None]
    assert (plain.public, plain.planned) == (None, None)


def test_a_portable_run_is_held_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []
    monkeypatch.setattr("fedemu.ops.assembly.coordinator.hold_to_portable", held.append)
    plan_of(tmp_path)
    assert held == []
    plan_of(tmp_path, "compute.portable=true")
    assert held == ["cpu"]


def test_a_run_is_diagnosed_only_on_request(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.diagnosis, plan.settings.diagnose_every) == (None, 0)


@pytest.mark.parametrize(("samples", "used"), [(0, 360), (50, 50), (1000, 360)])
def test_a_diagnosis_takes_as_many_test_samples_as_it_is_told(tmp_path: Path, samples: int, used: int) -> None:
    plan = plan_of(tmp_path, "diagnose.every=5", f"diagnose.samples={samples}")
    assert plan.diagnosis is not None
    assert (len(plan.diagnosis.evaluator), plan.settings.diagnose_every) == (used, 5)
    one, other = vars(plan.diagnosis.evaluator), vars(plan.evaluator)
    assert (one["_cache"] is other["_cache"]) == (samples == 0), "all samples are kept once"
    assert one["_model"] is not other["_model"], "they may work at the same time"


@pytest.mark.parametrize("samples", [0, 50])
def test_models_are_tested_on_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 3)
    plan = plan_of(tmp_path, "diagnose.every=5", f"diagnose.samples={samples}")
    assert plan.diagnosis is not None
    assert [vars(evaluator)["_threads"] for evaluator in (plan.evaluator, plan.diagnosis.evaluator)] == [3, 3]


def test_a_diagnosis_goes_by_the_samples_that_devices_get(tmp_path: Path) -> None:
    settings = ("diagnose.every=1", "data.validation=0.2", "data.public={fraction=0.1}")
    plan = plan_of(tmp_path, *settings)
    assert plan.diagnosis is not None
    assert plan.diagnosis.validates
    published = decode_tree(plan.partition)
    labels = open_corpus(load_experiment("digits-small", list(settings), {})[0]).train.y
    start, stop = published["offsets"][3:5]
    expected = np.bincount(labels[published["indices"][start:stop]], minlength=plan.classes)
    assert plan.diagnosis.label_counts([DeviceId(3)], round=1).tolist() == [expected.tolist()]


DRIFT = ("stream.kind=drift", "stream.periods=4", "stream.rounds_per_period=3", "stream.period_seconds=60")


def test_rounds_and_times_of_periods_are_those_of_the_stream_that_devices_get(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, *DRIFT, "replay.strategy=reservoir", "replay.capacity=6")
    published = StreamPlan.from_arrays(decode_tree(plan.partition))
    assert (len(published), published.arrivals.period_count, published.budget) == (20, 4, 6)
    assert [plan.settings.task_of_round(round) for round in (1, 3, 4, 12, 13)] == [0, 0, 1, 3, 3]
    assert [plan.settings.task_begins(task) for task in range(4)] == [0.0, 60.0, 120.0, 180.0]
    assert plan.settings.replay


def test_without_a_strategy_devices_keep_nothing(tmp_path: Path) -> None:
    assert not plan_of(tmp_path, *DRIFT, "replay.capacity=6").settings.replay


@pytest.mark.parametrize(("stream", "samples"), [(DRIFT, 360), (("stream.kind=periods",), 282)])
def test_a_model_is_tested_on_what_is_held_out_of_all_periods(
    tmp_path: Path, stream: tuple[str, ...], samples: int
) -> None:
    evaluator = plan_of(tmp_path, *stream).evaluator
    assert isinstance(evaluator, Evaluator)
    assert len(evaluator) == samples
