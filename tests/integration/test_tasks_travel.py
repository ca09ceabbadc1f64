"""What travels when a task begins, in whole runs: once to every machine, and also to a device that joins late."""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from replay_fleet import newest_versions
from tasks_fleet import TASKS

from fedemu.coordinator.record.records import newest_record
from fedemu.coordinator.record.row import read_rows
from fedemu.coordinator.record.summary import Summary
from fedemu.device.memory.store import read_own
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.training import job_process

DEVICES = 5
SLOW = (
    f"fleet.devices={DEVICES}",
    f"fleet.per_round={DEVICES}",
    "fleet.over_selection=1.0",
    "data.partition={kind='iid'}",
    # Tasks begin at 0, 1000 and 2000. A round in which a device is missing takes 250 seconds: it waits for that device.
    "fleet.deadline=250.0",
    "profile={seconds_per_sample=0.001, latency=100.0, down_kbps=1e9, up_kbps=1e9}",
    "stream={kind='classes', tasks=3, rounds_per_task=3, period_seconds=1000.0}",
)
METHODS = {
    "mfcl": ("algorithm.name='mfcl'", "algorithm.options={iterations=5, generator_batch=16, synthetic_batch=4}"),
    "fedprox_plus": ("algorithm.name='fedprox_plus'",),
    "fedlwf_2t": ("algorithm.name='fedlwf_2t'",),
    "fedcil": (
        "algorithm.name='fedcil'",
        "algorithm.options={server_iterations=5, server_samples=8}",
        "local.executor='serial'",
        "local.batch_size=50",
    ),
}
REMEMBERED = {
    "mfcl": {"previous", "generator"},
    "fedprox_plus": {"previous"},
    "fedlwf_2t": set[str](),
    "fedcil": {"generator"},
}
"""The keys that devices get beside the model from the second task on."""
SECONDS = 5.0
"""The least number of seconds that the generator's training lasts. A device may be silent for two seconds."""
SMALL = 10_000
"""The bytes of messages that carry no tensors, such as the heartbeats during a long training."""


def test_a_generator_travels_once_per_machine_and_heartbeats_go_on_while_it_is_trained(
    tmp_path: Path, new_fleet: Callable[..., LiveFleet]
) -> None:
    """Four devices join at the beginning; the fifth joins between the second and the third round of a task."""
    fleet = new_fleet(
        *TASKS.settings,
        *SLOW,
        *METHODS["mfcl"],
        "algorithm.options.iterations=100",
        _online_from(tmp_path, 0, 0, 0, 0, 1300),
        "rounds=6",
        "liveness={heartbeat_seconds=0.5, patience=4}",
        experiment=TASKS.experiment,
    )
    fleet.start_coordinator()
    fleet.start_devices(DEVICES, "--trainers", "1")
    fleet.wait_until(lambda: fleet.rounds() == 3 and job_process(fleet) is not None, "the training", 100)
    training = job_process(fleet)
    assert training is not None
    training.send_signal(signal.SIGSTOP)
    fleet.pause(SECONDS)
    training.send_signal(signal.SIGCONT)
    assert fleet.wait_for_end() == 0, fleet.tail()

    rows = fleet.rows()
    assert [row.accepted for row in rows] == [4, 4, 4, 4, 4, 5]
    assert (rows[3].server_seconds or 0.0) > SECONDS
    told = Counter(event["event"] for event in fleet.events())
    assert told["join"] == DEVICES, "nobody had to come back"
    assert not {"silence", "death", "dropout", "given_up"} & told.keys()
    assert not fleet.summary()["perturbed"]

    emulated = [row.bytes_down or 0 for row in rows[3:]]
    model = emulated[1] // 4
    beside = emulated[0] // 4 - model
    assert emulated == [4 * (model + beside), 4 * model, 5 * model + beside]
    wire = [row.wire_bytes_down or 0 for row in rows[3:]]
    assert wire[0] - wire[1] == pytest.approx(beside, abs=SMALL), "once for the four of them"
    assert wire[1] == pytest.approx(model, abs=SMALL)
    assert wire[2] == pytest.approx(model, abs=SMALL), "the fifth finds the rest on its machine"
    assert beside > 20 * SMALL


@pytest.mark.parametrize("name", sorted(METHODS))
def test_devices_that_come_with_the_third_task_take_part_in_its_first_round(
    name: str, tmp_path: Path, in_one_process: Callable[..., Summary]
) -> None:
    summary = in_one_process(
        tmp_path / "run",
        *TASKS.settings,
        *SLOW,
        *METHODS[name],
        _online_from(tmp_path, 0, 0, 0, 2000, 2000),
        "stream={kind='classes', tasks=3, rounds_per_task=1, period_seconds=1000.0}",
        "rounds=3",
        experiment=TASKS.experiment,
    )
    rows = read_rows(tmp_path / "run")
    assert [row.accepted for row in rows] == [3, 3, 5]
    assert not summary.perturbed
    each = [(row.bytes_down or 0) / (row.accepted or 1) for row in rows]
    assert each[1] == each[2], "as a task begins everything is new, to whoever was there before as well"
    newest = newest_record(tmp_path / "run" / "checkpoint")
    assert newest is not None
    sent = newest["record"]["roster"]["charged"]
    assert sent.keys() == {"model", *REMEMBERED[name]}
    assert all(sorted(itertools.chain(*by_digest.values())) == [*range(DEVICES)] for by_digest in sent.values())
    own = {device: read_own(path) for device, path in newest_versions(tmp_path / "run").items()}
    if name == "fedlwf_2t":
        assert {int(state["task"]) for state in own.values()} == {2}
        past = [int(own[device]["known"]) for device in range(DEVICES)]
        assert past == [1, 1, 1, 0, 0], "those that have just come have no model of an earlier task"
    else:
        assert not own


@pytest.mark.parametrize(
    ("question", "kept"),
    [(("replay={strategy='herding', capacity=5}",), 0), (("algorithm.terms={ewc={coefficient=1.0}}",), 2)],
    ids=["herding", "ewc"],
)
@pytest.mark.parametrize(
    ("stream", "model"),
    [("{kind='classes', tasks=2, rounds_per_task=2}", 1), ("{kind='drift', periods=2, rounds_per_period=2}", 0)],
    ids=["classes", "drift"],
)
def test_after_a_question_at_the_end_of_a_period_devices_need_a_new_model_only_where_classes_come(
    question: tuple[str, ...],
    kept: int,
    stream: str,
    model: int,
    tmp_path: Path,
    in_one_process: Callable[..., Summary],
) -> None:
    in_one_process(
        tmp_path / "run",
        f"stream={stream}",
        *question,
        "fleet.devices=4",
        "fleet.per_round=4",
        "fleet.over_selection=1.0",
        "availability={kind='always'}",
        "faults.crash_rate=0.0",
        "rounds=3",
    )
    down = [row.bytes_down or 0 for row in read_rows(tmp_path / "run")]
    # In models: that of the round, that of the question, and what the next round needs, beside what a term keeps.
    assert [round(size / down[0]) for size in down] == [1, 2, model + kept]


def _online_from(directory: Path, *seconds: float) -> str:
    """The setting with which device i comes on-line at the i-th of these times and stays on-line."""
    lines = ["device,start,end", *(f"{device},{start}," for device, start in enumerate(seconds))]
    (directory / "availability.csv").write_text("\n".join(lines) + "\n")
    return f"availability={{kind='trace', file='{directory / 'availability.csv'}', at_end='end'}}"
