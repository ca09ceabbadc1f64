"""Coordinated selection on real fleets under churn. Processes are killed or interrupted in the middle of an exchange.

The final model and the replay buffers are those of an undisturbed run in one process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from replay_fleet import (
    ARRIVING,
    BUDGET,
    CHURN,
    EXCHANGES,
    STEADY,
    buffers,
    contents,
    newest_versions,
    published_plan,
    version_of,
)

from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.row import Row, read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.device.memory.replay_buffer import split_own
from fedemu.device.memory.store import read_own
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import outcomes_add_up
from fedemu.protocol.ids import AskId

ROUNDS, DEVICES = STEADY.rounds, STEADY.devices

Play = Callable[..., Summary]
FleetMaker = Callable[..., LiveFleet]


@dataclass(frozen=True)
class Played:
    """An undisturbed run in one process."""

    directory: Path
    summary: Summary

    @property
    def rows(self) -> tuple[Row, ...]:
        return read_rows(self.directory)

    @property
    def dropped(self) -> list[AskId]:
        """The asks in which devices dropped out."""
        events = read_lines(self.directory / "events.jsonl")
        return [AskId.parse(event["ask"]) for event in events if event["event"] == "dropout"]


@pytest.fixture(scope="module")
def coordinated(tmp_path_factory: pytest.TempPathFactory, in_one_process: Play) -> Played:
    directory = tmp_path_factory.mktemp("coordinated") / "run"
    return Played(directory, in_one_process(directory, *STEADY.settings, *CHURN))


def test_devices_drop_out_of_exchanges_miss_them_and_select_later(coordinated: Played) -> None:
    exchanges = [coordinated.rows[round - 1].remarks for round in EXCHANGES]
    answered = [exchange["coordination"]["devices"] for exchange in exchanges]
    chose = [exchange["replay"]["devices"] for exchange in exchanges]
    assert all(0 < devices < DEVICES for devices in answered), "some were away for a whole exchange"
    assert any(ask.round in EXCHANGES and ask.ordinal > 0 for ask in coordinated.dropped), "some dropped inside one"
    assert any(few < many for few, many in zip(chose, answered, strict=True)), "some answered and did not get to choose"
    periods = [buffer.period for buffer in buffers(coordinated.directory).values()]
    over = [sum(period > ended for period in periods) for ended in range(len(EXCHANGES))]
    assert any(now > then for now, then in zip(over, chose, strict=True)), "some chose from sealed samples later"
    assert any(sum(exchange["replay"]["periods"][:2]) for exchange in exchanges[2:]), "old periods are remembered"


def test_a_device_stores_its_own_choice_of_earlier_periods_and_nothing_else_of_them(coordinated: Played) -> None:
    plan = published_plan(coordinated.directory)
    [lease] = {path.parents[2] for path in coordinated.directory.rglob("own-*.safetensors")}
    assert {path.name for path in lease.iterdir()} == {"blobs", "devices", "lease.json"}
    newest = newest_versions(coordinated.directory)
    for device, path in newest.items():
        assert all(file.match("own-*.safetensors") for file in path.parent.iterdir())
        program, buffer = split_own(read_own(path))
        assert not program, "federated averaging keeps nothing of its own"
        assert set(buffer.periods.tolist()) <= set(range(buffer.period)), "nothing of the period to select from"
        assert buffer.period <= plan.period_of(version_of(path).round + 1)
        assert len(np.unique(buffer.indices)) == len(buffer) <= BUDGET
        for index, period in zip(buffer.indices, buffer.periods, strict=True):
            assert index in plan.sealed(device, period)
        # A device remembers weights for the samples that it has not chosen from yet, and one sum of their gradients.
        assert {leaf.dtype.name for leaf in buffer.answered.values()} <= {"float32", "float64"}
    assert len(newest) == DEVICES


def test_kills_in_the_middle_of_the_exchange_leave_model_and_buffers_as_they_would_be(
    coordinated: Played, new_fleet: FleetMaker
) -> None:
    fleet = new_fleet(*STEADY.settings, *CHURN)
    fleet.start_coordinator()
    fleet.start_devices(DEVICES, "--trainers", "1")
    _wait_for_exchange(fleet, EXCHANGES[0])
    for process in [*fleet.processes("device")[::3], *fleet.processes("trainer")]:
        fleet.signal(process, signal.SIGKILL)
    _strike_in_exchange(fleet, EXCHANGES[1:], lambda: _end_coordinator(fleet, signal.SIGKILL), fleet.start_coordinator)
    assert fleet.wait_for_end() == 0, fleet.tail()
    rows = fleet.rows()
    assert (len(rows), fleet.summary()["perturbed"]) == (ROUNDS, False)
    assert outcomes_add_up(rows) == []
    assert [row.remarks for row in rows] == [row.remarks for row in coordinated.rows]
    assert fleet.summary()["model_digest"] == coordinated.summary.model_digest
    assert contents(fleet.run_directory.parent) == contents(coordinated.directory)


def test_a_run_interrupted_in_an_exchange_goes_on_to_more_rounds_with_other_processes(
    tmp_path: Path, in_one_process: Play, new_fleet: FleetMaker
) -> None:
    """A method that keeps an own state, with targets for each device and samples that arrive during the run."""
    settings = (*STEADY.settings, *CHURN, "algorithm.name='scaffold'", "replay.targets='each'", ARRIVING)
    expected = in_one_process(tmp_path / "undisturbed", *settings, f"rounds={ROUNDS}")
    fleet = new_fleet(*settings, f"rounds={ROUNDS - 3}")
    fleet.start_coordinator()
    fleet.start_devices(DEVICES, "--trainers", "1")

    def interrupt() -> None:
        assert _end_coordinator(fleet, signal.SIGINT) == 4, fleet.tail()
        assert fleet.supervisors[-1].wait(300) == 4, fleet.tail()

    def resume() -> None:
        fleet.start_coordinator("--rounds", str(ROUNDS))
        fleet.start_devices(DEVICES, "--trainers", "1", "--per-process", "6")

    _strike_in_exchange(fleet, EXCHANGES[:2], interrupt, resume)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert (len(fleet.rows()), fleet.summary()["perturbed"]) == (ROUNDS, False)
    assert fleet.summary()["model_digest"] == expected.model_digest
    assert contents(fleet.run_directory.parent) == contents(tmp_path / "undisturbed")


def _wait_for_exchange(fleet: LiveFleet, round: int) -> None:
    """Wait until a device has answered in the exchange that ends ``round``, or until that round is over."""
    pattern = f"state/*/*/*/devices/*/own-{round}.?.[1-9].safetensors"
    directory = fleet.run_directory.parent
    fleet.wait_until(
        lambda: any(directory.glob(pattern)) or fleet.rounds() >= round, f"the exchange of round {round}", 100
    )


def _strike_in_exchange(
    fleet: LiveFleet, rounds: tuple[int, ...], strike: Callable[[], object], resume: Callable[[], object]
) -> None:
    """End the coordinator during the first exchange in which it can be caught, then resume the run."""
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
    return int(fleet.coordinator.wait(300))
