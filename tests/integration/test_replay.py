"""Streams, replay buffers and coordinated selection over real fleets that come and go: killed in mid-exchange, resumed,
and grouped otherwise, they end with the model and the buffers of an undisturbed run in one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.replay_buffer import Buffer
from fedemu.algorithms.streams_plan import StreamPlan
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.summary import Summary
from fedemu.device.replay import split_own
from fedemu.device.store import read_own
from fedemu.ops.config_sources import load_experiment
from fedemu.ops.datasets import build_partition, open_corpus
from fedemu.ops.streams import open_stream
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import clock_goes_forward, outcomes_add_up
from fedemu.protocol.ids import AskId

DEVICES = 16
BUDGET = 6
ROUNDS = 8
EXCHANGES = (2, 4, 6)
"""The last rounds of all periods but the last."""
SMALL = (
    f"fleet.devices={DEVICES}",
    "fleet.start_timeout=120.0",
    "fleet.give_up=90.0",
    "liveness.heartbeat_seconds=1.0",
    "data.partition={kind='dirichlet', alpha=1.0, min_samples=20}",
    "model.hidden=[16]",
)
DRIFT = (f"rounds={ROUNDS}", "stream={kind='drift', periods=4, rounds_per_period=2, alpha=0.5}")
CHURN = (
    "availability={kind='exponential', mean_online=120.0, mean_offline=60.0}",
    "profile.seconds_per_sample={kind='lognormal', median=0.1, sigma=0.5}",
    "fleet.deadline=120.0",
    "faults.crash_rate=0.1",
)
ARRIVING = "stream={kind='drift', periods=4, rounds_per_period=2, alpha=0.5, arrivals='poisson', period_seconds=500.0}"
FEW = (
    *SMALL,
    f"fleet.devices={DEVICES // 2}",
    "rounds=3",
    "stream={kind='drift', periods=3, rounds_per_period=1, alpha=0.5}",
)
SLOW = (
    "local.epochs=1",
    "profile.seconds_per_sample=1.0",
    "profile.latency=60.0",
    "profile.down_kbps=1e9",
    "profile.up_kbps=1e9",
    "fleet.deadline=5000.0",
    f"fleet.per_round={DEVICES}",
    "fleet.over_selection=1.0",
)
STEADY = ("availability={kind='always'}", "faults.crash_rate=0.0")
COORDINATED = f"replay={{strategy='coordinated', capacity={BUDGET}, iterations=3}}"
EACH = COORDINATED.replace("iterations", "targets='each', iterations")
METHODS = {
    "moon": ("algorithm.name='moon'",),
    "flashback": (
        "algorithm.name='flashback'",
        "algorithm.options.server_epochs=3",
        "data.public={fraction=0.1}",
    ),
}

Play = Callable[..., Summary]
FleetMaker = Callable[..., LiveFleet]


@dataclass(frozen=True)
class Played:
    """A run in one process that nobody disturbed."""

    directory: Path
    summary: Summary

    @property
    def rows(self) -> list[dict[str, Any]]:
        return _lines(self.directory / "metrics.jsonl")

    @property
    def dropped(self) -> list[AskId]:
        """The asks in which devices dropped out."""
        events = _lines(self.directory / "events.jsonl")
        return [AskId.parse(event["ask"]) for event in events if event["event"] == "dropout"]


@pytest.fixture(scope="module")
def coordinated(tmp_path_factory: pytest.TempPathFactory, in_one_process: Play) -> Played:
    directory = tmp_path_factory.mktemp("coordinated") / "run"
    return Played(directory, in_one_process(directory, *SMALL, *DRIFT, *CHURN, COORDINATED))


def test_devices_drop_out_of_exchanges_miss_them_and_select_later(coordinated: Played) -> None:
    exchanges = [coordinated.rows[round - 1]["remarks"] for round in EXCHANGES]
    answered = [exchange["coordination"]["devices"] for exchange in exchanges]
    chose = [exchange["replay"]["devices"] for exchange in exchanges]
    assert all(0 < devices < DEVICES for devices in answered), "some were away for a whole exchange"
    assert any(ask.round in EXCHANGES and ask.ordinal > 0 for ask in coordinated.dropped), "some dropped inside one"
    assert any(few < many for few, many in zip(chose, answered, strict=True)), "some answered and did not get to choose"
    periods = [buffer.period for buffer in _buffers(coordinated.directory).values()]
    over = [sum(period > ended for period in periods) for ended in range(len(EXCHANGES))]
    assert any(now > then for now, then in zip(over, chose, strict=True)), "some chose from sealed samples later"
    assert any(sum(exchange["replay"]["periods"][:2]) for exchange in exchanges[2:]), "old periods are remembered"


def test_kills_in_the_middle_of_the_exchange_leave_model_and_buffers_as_they_would_be(
    coordinated: Played, new_fleet: FleetMaker
) -> None:
    fleet = new_fleet(*SMALL, *DRIFT, *CHURN, COORDINATED)
    fleet.start_coordinator()
    fleet.start_devices(DEVICES, "--trainers", "1")
    _wait_for_exchange(fleet, EXCHANGES[0])
    for process in [*fleet.processes("device")[::3], *fleet.processes("trainer")]:
        fleet.signal(process, signal.SIGKILL)
    _strike_in_exchange(fleet, EXCHANGES[1:], lambda: _end_coordinator(fleet, signal.SIGKILL), fleet.start_coordinator)
    assert fleet.wait_for_end(100) == 0, fleet.tail()
    rows = fleet.rows()
    assert (len(rows), fleet.summary()["perturbed"]) == (ROUNDS, False)
    assert outcomes_add_up(rows) == []
    assert [row["remarks"] for row in rows] == [row["remarks"] for row in coordinated.rows]
    assert fleet.summary()["model_digest"] == coordinated.summary.model_digest
    assert _contents(fleet.run_directory.parent) == _contents(coordinated.directory)


def test_a_run_interrupted_in_an_exchange_goes_on_to_more_rounds_with_other_processes(
    tmp_path: Path, in_one_process: Play, new_fleet: FleetMaker
) -> None:
    """A method with own states, targets for each device, and samples that arrive meanwhile."""
    settings = (*SMALL, *CHURN, "algorithm.name='scaffold'", EACH, ARRIVING)
    expected = in_one_process(tmp_path / "undisturbed", *settings, f"rounds={ROUNDS}")
    fleet = new_fleet(*settings, f"rounds={ROUNDS - 3}")
    fleet.start_coordinator()
    fleet.start_devices(DEVICES, "--trainers", "1")

    def interrupt() -> None:
        assert _end_coordinator(fleet, signal.SIGINT) == 4, fleet.tail()
        assert fleet.supervisors[-1].wait(30) == 0, fleet.tail()

    def resume() -> None:
        fleet.start_coordinator("--rounds", str(ROUNDS))
        fleet.start_devices(DEVICES, "--trainers", "1", "--per-process", "6")

    _strike_in_exchange(fleet, EXCHANGES[:2], interrupt, resume)
    assert fleet.wait_for_end(100) == 0, fleet.tail()
    assert (len(fleet.rows()), fleet.summary()["perturbed"]) == (ROUNDS, False)
    assert fleet.summary()["model_digest"] == expected.model_digest
    assert _contents(fleet.run_directory.parent) == _contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("strategy", ["naive_uniform", "reservoir", "herding", "gss_greedy", "diversity"])
def test_a_device_that_chooses_alone_chooses_the_same_again(
    strategy: str, tmp_path: Path, in_one_process: Play
) -> None:
    settings = (*FEW, *STEADY, f"replay={{strategy='{strategy}', capacity={BUDGET}}}")
    runs = [in_one_process(tmp_path / name, *settings).model_digest for name in ("first", "second")]
    assert runs[0] == runs[1]
    first, second = _contents(tmp_path / "first"), _contents(tmp_path / "second")
    assert first == second
    assert {len(indices) for _, indices, _ in first.values()} == {BUDGET}


def test_a_device_that_chooses_alone_chooses_the_same_in_any_process(
    tmp_path: Path, in_one_process: Play, new_fleet: FleetMaker
) -> None:
    settings = (*FEW, *STEADY, f"replay={{strategy='diversity', capacity={BUDGET}}}")
    expected = in_one_process(tmp_path / "undisturbed", *settings)
    fleet = new_fleet(*settings)
    fleet.start_coordinator()
    fleet.start_devices(DEVICES // 2, "--trainers", "2", "--per-process", "3")
    assert fleet.wait_for_end(100) == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == expected.model_digest
    assert _contents(fleet.run_directory.parent) == _contents(tmp_path / "undisturbed")


def test_targets_by_mean_and_for_each_device_lead_to_the_same_choice(tmp_path: Path, in_one_process: Play) -> None:
    objectives = []
    for name, replay in (("mean", COORDINATED), ("each", EACH)):
        in_one_process(tmp_path / name, *SMALL, *DRIFT, *CHURN, replay, f"rounds={EXCHANGES[0]}")
        last = _lines(tmp_path / name / "metrics.jsonl")[-1]
        objectives.append(last["remarks"]["coordination"]["objective"])
    assert _contents(tmp_path / "mean") == _contents(tmp_path / "each")
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-5)


@pytest.mark.parametrize("method", ["moon", "flashback"])
def test_a_coordinator_that_fails_in_an_exchange_goes_on_with_own_states_and_buffers(
    method: str, tmp_path: Path, in_one_process: Play
) -> None:
    settings = (*SMALL, *DRIFT, *CHURN, f"rounds={EXCHANGES[1] + 1}", COORDINATED, *METHODS[method])
    expected = in_one_process(tmp_path / "undisturbed", *settings)
    resumed = tmp_path / "resumed"
    with pytest.raises(_Unplugged):
        in_one_process(resumed, *settings, observers=[_Unplugs(EXCHANGES[1])])
    assert len(_lines(resumed / "metrics.jsonl")) == EXCHANGES[1] - 1
    summary = in_one_process(resumed, *settings)
    assert (summary.model_digest, summary.perturbed) == (expected.model_digest, False)
    assert _contents(resumed) == _contents(tmp_path / "undisturbed")
    own = {name for path in _newest(resumed).values() for name in split_own(read_own(path))[0]}
    assert bool(own) == (method == "moon")


def test_a_device_stores_its_own_choice_of_earlier_periods_and_nothing_else_of_them(coordinated: Played) -> None:
    plan = _plan(coordinated.directory)
    [lease] = {path.parents[2] for path in coordinated.directory.rglob("own-*.safetensors")}
    assert {path.name for path in lease.iterdir()} == {"blobs", "devices", "lease.json"}
    newest = _newest(coordinated.directory)
    for device, path in newest.items():
        assert all(file.match("own-*.safetensors") for file in path.parent.iterdir())
        program, buffer = split_own(read_own(path))
        assert not program, "federated averaging keeps nothing of its own"
        assert set(buffer.periods.tolist()) <= set(range(buffer.period)), "nothing of the period to select from"
        assert buffer.period <= plan.period_of(AskId.parse(path.stem.removeprefix("own-")).round + 1)
        assert len(np.unique(buffer.indices)) == len(buffer) <= BUDGET
        for index, period in zip(buffer.indices, buffer.periods, strict=True):
            assert index in plan.sealed(device, period)
        # Of samples that it has not chosen from yet it remembers weights, and one sum of their gradients.
        assert {leaf.dtype.name for leaf in buffer.answered.values()} <= {"float32", "float64"}
    assert len(newest) == DEVICES


def test_samples_arrive_as_the_clock_goes_and_a_period_begins_in_time(tmp_path: Path, in_one_process: Play) -> None:
    """An ask takes two minutes of latency, and a second for each sample of the device with most: the clock tells."""
    settings = (*SMALL, *STEADY, ARRIVING, *SLOW, f"replay={{strategy='reservoir', capacity={BUDGET}}}")
    in_one_process(tmp_path / "run", *settings, f"rounds={ROUNDS}")
    plan, rows = _plan(tmp_path / "run"), _lines(tmp_path / "run" / "metrics.jsonl")
    assert clock_goes_forward(rows) == []
    kept, time, arrived = np.zeros(DEVICES, np.int64), 0.0, []
    for row in rows:
        time = max(time, plan.begins(row["task"]))
        held = np.array([len(plan.held(device, row["round"], time)) for device in range(DEVICES)])
        time += 120 + float(np.max(held + kept))
        arrived.append(held.sum())
        if row["round"] in EXCHANGES:
            at_the_end = [len(plan.held(device, row["round"], time)) for device in range(DEVICES)]
            kept = np.minimum(BUDGET, kept + at_the_end)
            time += 120
        assert row["virtual_time"] == pytest.approx(time, abs=1e-3)
    assert all(arrived[round - 2] < arrived[round - 1] for round in (*EXCHANGES, ROUNDS)), "X_t grows in its period"
    assert [row["task"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]


class _Unplugged(Exception):
    pass


class _Unplugs(Observers):
    """Fails at the first drop-out inside of the exchange that ends a round."""

    def __init__(self, round: int) -> None:
        super().__init__()
        self._round = round

    def event(self, name: str, **fields: Any) -> None:
        if name == "dropout":
            ask = AskId.parse(fields["ask"])
            if ask.round == self._round and ask.ordinal > 0:
                raise _Unplugged


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _plan(directory: Path) -> StreamPlan:
    experiment, _ = load_experiment(str(directory / "config.toml"), [], {})
    corpus = open_corpus(experiment)
    partition = build_partition(corpus, experiment.data, devices=experiment.fleet.devices, seed=experiment.seed)
    return open_stream(experiment, corpus, partition)[0]


def _newest(directory: Path) -> dict[int, Path]:
    """Every device's newest version of its own state, wherever it lies below the directory."""
    versions: dict[int, list[Path]] = {}
    for path in directory.rglob("own-*.safetensors"):
        versions.setdefault(int(path.parent.name), []).append(path)
    return {
        device: max(paths, key=lambda path: AskId.parse(path.stem.removeprefix("own-")))
        for device, paths in sorted(versions.items())
    }


def _buffers(directory: Path) -> dict[int, Buffer]:
    return {device: split_own(read_own(path))[1] for device, path in _newest(directory).items()}


def _contents(directory: Path) -> dict[int, tuple[int, list[int], list[int]]]:
    """What every device has come to and keeps: the first period not selected from, and its samples with theirs."""
    buffers = _buffers(directory).items()
    return {device: (buffer.period, buffer.indices.tolist(), buffer.periods.tolist()) for device, buffer in buffers}


def _wait_for_exchange(fleet: LiveFleet, round: int) -> None:
    """Until a device has answered the exchange that ends a round at least once, or that is over already."""
    pattern = f"state/*/*/*/devices/*/own-{round}.?.[1-9].safetensors"
    directory = fleet.run_directory.parent
    fleet.wait_until(
        lambda: any(directory.glob(pattern)) or len(fleet.rows()) >= round, f"the exchange of round {round}", 100
    )


def _strike_in_exchange(
    fleet: LiveFleet, rounds: tuple[int, ...], strike: Callable[[], object], resume: Callable[[], object]
) -> None:
    """End the coordinator in the first of the exchanges that it is caught in, and go on."""
    for round in rounds:
        _wait_for_exchange(fleet, round)
        strike()
        reached = len(fleet.rows())
        resume()
        if reached < round:
            return
    pytest.fail(f"every one of the exchanges of rounds {rounds} was over too soon")


def _end_coordinator(fleet: LiveFleet, number: int) -> int:
    assert fleet.coordinator is not None
    fleet.signal(fleet.coordinator, number)
    return int(fleet.coordinator.wait(30))
