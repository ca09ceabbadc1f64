"""The diagnosis of a round's models has the right numbers, and changes nothing in the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.interface import Forest, Outputs, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.period_tests import PeriodTests
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.coordinator.asks.payload import spill
from fedemu.coordinator.evaluation.alignment import Preferences, alignment
from fedemu.coordinator.evaluation.diagnosis import Diagnosis, RoundDiagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.protocol import messages as wire
from fedemu.protocol.ids import DeviceId, digest_of
from fedemu.protocol.tensors import pack
from fedemu.protocol.transport.memory import MemoryNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]


class Threshold:
    """Answers class 1 for inputs below ``w[0]`` and class 0 for others, never class 2."""

    kind = "dense"
    buffers = frozenset({"b"})

    def apply(self, variables: Tree, x: torch.Tensor, train: bool) -> tuple[Outputs, Tree]:
        one = variables["w"][:1].expand(len(x), 1)
        return Outputs(torch.cat([x, one, torch.full_like(x, -1e9)], 1), x, {}), variables


TEST = [(0.5, 0), (1.0, 0), (1.5, 0), (2.0, 0), (0.0, 1), (0.5, 1), (1.0, 1), (3.0, 1)]
TRAIN = [(0.0, 0), (0.0, 0), (0.0, 0), (0.0, 1), (0.0, 1), (1.0, 0), (2.0, 0), (1.0, 1)]


def corpus() -> Corpus:
    def split(samples: Sequence[tuple[float, int]]) -> Split:
        x, y = zip(*samples, strict=True)
        return Split(np.array(x, np.float32)[:, None], np.array(y), {})

    return Corpus("tiny", split(TRAIN), split(TEST), tuple("abc"), (1,), np.zeros(1), np.ones(1), digest_of(b""))


def partition(train: Sequence[Sequence[int]], validation: Sequence[Sequence[int]]) -> Partition:
    def flat(parts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        return np.cumsum([0, *map(len, parts)]), np.array([index for part in parts for index in part], np.int64)

    return Partition(*flat(train), *flat(validation))


def diagnosis(train: Sequence[Sequence[int]], validation: Sequence[Sequence[int]], samples: int = 0) -> Diagnosis:
    data = corpus()
    model: Any = Threshold()
    return Diagnosis(model, data, partition(train, validation), Evaluator(model, data, samples=samples))


class Moves:
    """A program whose devices send how far they moved."""

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        return {name: shared["model"][name] + payload["move"][name] for name in shared["model"]}


def model(threshold: float, b: float = 1.0) -> Tree:
    return {"w": torch.tensor([threshold, 0.0]), "b": torch.tensor([b])}


def examine(round: RoundDiagnosis, moves: Mapping[int, float], folder: Path) -> None:
    round.begin([DeviceId(device) for device in moves])
    for device, move in moves.items():
        leaves = {"move/w": np.array([move, 0.0], np.float32), "move/b": np.array([100.0], np.float32)}
        specs, frames = pack(leaves)
        payload = spill(folder, device, specs, [memoryview(bytes(frame)) for frame in frames])
        round.examine(Moves(), {"model": model(0.75)}, payload)
        payload.discard()


SHARES = [[], [4], [], [0, 1, 2, 3]]
"""Device 1 holds class 1 alone, device 3 three samples of class 0 and one of class 1."""


def found(tmp_path: Path, validation: Sequence[Sequence[int]] = ((), (), (), ()), samples: int = 0) -> dict[str, Any]:
    """The line of a round: devices 3 and 1 moved the threshold from 0.75 to 1.25 and 2.5, the server to 1.875."""
    round = diagnosis(SHARES, validation, samples).open(7, model(0.75))
    examine(round, {3: 0.5, 1: 1.75}, tmp_path)
    line = round.conclude(model(1.875))
    assert line is not None
    return line


def test_a_round_in_which_nobody_replied_has_no_line() -> None:
    round = diagnosis(SHARES, ((), (), (), ()), 0).open(7, model(0.75))
    round.begin([])
    assert round.conclude(model(1.875)) is None


def known(values: Any) -> list[float]:
    """The values of the classes that have test samples."""
    return np.asarray(values)[..., :2].tolist()


def test_every_model_is_tested_by_class(tmp_path: Path) -> None:
    line = found(tmp_path)
    assert (line["round"], line["devices"], line["samples"]) == (7, (3, 1), 8)
    assert line["label_counts"].tolist() == [[3, 1, 0], [0, 1, 0]]
    assert known(line["before"]["class_accuracy"]) == [0.75, 0.5]
    assert known(line["locals"]["class_accuracy"]) == [[0.5, 0.75], [0.0, 0.75]]
    assert known(line["after"]["class_accuracy"]) == [0.25, 0.75]
    assert line["locals"]["accuracy"] == [0.625, 0.375]
    assert math.isnan(line["before"]["class_accuracy"][2])
    assert math.isnan(line["locals"]["class_loss"][0][2])


def test_losses_by_class_add_up_to_the_whole(tmp_path: Path) -> None:
    line = found(tmp_path)
    expected = np.mean([math.log1p(math.exp(1.25 - x)) for x, y in TEST if y == 0])
    assert line["locals"]["class_loss"][0][0] == pytest.approx(expected)
    for loss, by_class in zip(line["locals"]["loss"], line["locals"]["class_loss"], strict=True):
        assert loss == pytest.approx(np.mean(by_class[:2]))
    assert line["locals"]["in_local_loss"][1] == pytest.approx(line["locals"]["class_loss"][1][1])


def test_in_local_and_out_local_weigh_classes_as_the_device_holds_them_and_does_not(tmp_path: Path) -> None:
    line = found(tmp_path)
    # Device 3 holds 3/4, 1/4 and 0, the complement of which is 1/8, 3/8 and 1/2 (of a class without test samples).
    assert line["locals"]["in_local"].tolist() == [0.75 * 0.5 + 0.25 * 0.75, 0.75]
    assert line["locals"]["out_local"].tolist() == [(0.125 * 0.5 + 0.375 * 0.75) / 0.5, 0.0]
    assert line["before_in_local"].tolist() == [0.75 * 0.75 + 0.25 * 0.5, 0.5]
    assert line["after_out_local"].tolist() == [(0.125 * 0.25 + 0.375 * 0.75) / 0.5, 0.25]


def test_the_losses_by_training_by_aggregation_and_by_the_round_are_told_apart(tmp_path: Path) -> None:
    line = found(tmp_path)
    assert line["local_forgetting"] == (0.25 / 2 + 0.75 / 2) / 2
    assert line["aggregation_forgetting"] == (0.25 / 2 + 0.0) / 2
    assert line["round_forgetting"] == 0.5 / 2


def test_neurons_are_aligned_if_they_prefer_the_class_that_they_preferred_before(tmp_path: Path) -> None:
    """The features are the inputs, so their one neuron prefers class 0 in each model (means 1.25 and 1.125).

    The first neuron of the logits is the same. The others are constant, so that they prefer the lowest class.
    """
    line = found(tmp_path)
    assert line["alignment"]["features"] == {"locals": [1.0, 1.0], "after": 1.0}
    assert (line["local_alignment"], line["global_alignment"]) == (1.0, 1.0)


def test_preferences_are_those_of_all_batches_together() -> None:
    def told(features: list[list[float]], split: int) -> Preferences:
        values, labels = torch.tensor(features), torch.tensor([0, 0, 1])
        preferences = Preferences(3)
        for part in (slice(0, split), slice(split, None)):
            preferences.watch(Outputs(-values[part], values[part], {}), labels[part])
        return preferences

    before = told([[1.0, 0.0], [3.0, 0.0], [2.5, 1.0]], 1)  # means 2 and 2.5; 0 and 1
    assert before.of("features").tolist() == [1, 1]
    assert before.of("logits").tolist() == [0, 0]
    local = told([[1.0, 0.0], [5.0, 0.0], [2.5, 1.0]], 2)  # the first neuron now prefers class 0
    same = told([[1.0, 0.0], [3.0, 0.0], [9.0, 9.0]], 2)
    found = alignment(before, [local, same], local)
    assert found["alignment"]["features"] == {"locals": [0.5, 1.0], "after": 0.5}
    assert (found["local_alignment"], found["global_alignment"]) == (0.75, 0.5)


def test_logits_of_classes_that_have_not_come_are_no_neurons(tmp_path: Path) -> None:
    """Before the round the three logits prefer the classes 0, 0 and 0, and after it the first one prefers class 1."""

    class Turned(Threshold):
        """The first logit falls with the input if ``w[1]`` is above 0."""

        buffers = frozenset({"b", SEEN})

        def apply(self, variables: Tree, x: torch.Tensor, train: bool) -> tuple[Outputs, Tree]:
            outputs, _ = super().apply(variables, x, train)
            logits = outputs.logits * torch.tensor([1.0, 0.0, 0.0])
            return outputs._replace(logits=-logits if variables["w"][1] > 0 else logits), variables

    data, turned = corpus(), Turned()
    basis = Diagnosis(turned, data, partition(SHARES, [[]] * 4), Evaluator(turned, data))  # type: ignore[arg-type]
    turning = {"w": torch.tensor([1.875, 1.0]), "b": torch.tensor([1.0])}
    for seen, after in (([1.0, 1.0, 1.0], 2 / 3), ([1.0, 1.0, 0.0], 1 / 2), ([1.0, 0.0, 0.0], 0.0)):
        round = basis.open(7, {**model(0.75), SEEN: torch.tensor(seen)})
        examine(round, {3: 0.5, 1: 1.75}, tmp_path)
        line = round.conclude({**turning, SEEN: torch.ones(3)})
        assert line is not None
        assert line["alignment"]["logits"] == {"locals": [1.0, 1.0], "after": after}
        assert line["alignment"]["features"] == {"locals": [1.0, 1.0], "after": 1.0}


def test_drift_is_that_of_the_trained_variables(tmp_path: Path) -> None:
    line = found(tmp_path)
    assert line["weight_divergence"].tolist() == [0.5, 1.75]
    assert line["gradient_diversity"] == (0.5**2 + 1.75**2) / 2 / 1.125**2


def test_a_move_begins_with_the_model_that_the_device_was_sent(tmp_path: Path) -> None:
    """When a task begins, rows of the classifier are drawn between the last test of the model and the first ask."""
    round = diagnosis(SHARES, [[], [], [], []]).open(7, model(5.0))
    examine(round, {3: 0.5, 1: 1.75, 0: 2.25}, tmp_path)
    line = round.conclude(model(1.875))
    assert line is not None
    assert line["weight_divergence"].tolist() == [0.5, 1.75, 2.25]
    assert line["gradient_diversity"] == pytest.approx((0.5**2 + 1.75**2 + 2.25**2) / 3 / 1.5**2)


def test_without_validation_parts_there_is_no_matrix(tmp_path: Path) -> None:
    assert found(tmp_path)["validation"] is None


def test_with_validation_parts_each_model_is_tested_on_the_data_of_each_device(tmp_path: Path) -> None:
    # Device 3 keeps (1.0, class 0) and (2.0, class 0), device 1 (1.0, class 1); devices 0 and 2 were not selected.
    matrix = found(tmp_path, validation=[[0], [7], [], [5, 6]])["validation"]
    assert matrix["global_accuracy"].tolist() == [1.0, 0.0]
    assert np.stack(matrix["local_accuracy"]).tolist() == [[0.5, 1.0], [0.0, 1.0]]
    assert matrix["forgetting"].tolist() == [[0.5, -1.0], [1.0, -1.0]]
    assert matrix["mean_forgetting"] == 0.0


def test_a_device_without_validation_samples_takes_no_part_in_the_mean(tmp_path: Path) -> None:
    matrix = found(tmp_path, validation=[[], [], [], [5, 6]])["validation"]
    assert math.isnan(matrix["global_accuracy"][1])
    assert matrix["mean_forgetting"] == 1.0  # what device 1 lost on the data of device 3


def test_samples_are_evenly_spaced_over_the_test_split(tmp_path: Path) -> None:
    line = found(tmp_path, samples=4)
    assert line["samples"] == 4
    assert known(line["before"]["class_accuracy"]) == [0.5, 0.5]  # 0.5 and 1.5 of class 0, 0.0 and 1.0 of class 1


@pytest.mark.parametrize(
    ("round", "cumulative", "expected"),
    [(2, False, [[2, 0, 0], [0, 1, 0]]), (3, False, [[1, 1, 0], [0, 0, 0]]), (3, True, [[3, 1, 0], [0, 1, 0]])],
)
def test_with_periods_a_device_holds_what_arrives_in_the_rounds_own(
    tmp_path: Path, round: int, cumulative: bool, expected: list[list[int]]
) -> None:
    data, threshold = corpus(), Threshold()
    shares = partition(SHARES, [[], [], [], []])
    periods = np.array([0, 0, 0, 1, 1])
    arrivals = Arrivals.of(shares, np.array([0, 1, 2, 3, 4]), periods, 2)
    tests = PeriodTests(np.array([0, 2, 4]), np.array([0, 4, 1, 5]), held_out=False)
    evaluator = Evaluator(threshold, data, tests)  # type: ignore[arg-type]
    plan = StreamPlan(arrivals, rounds_per_period=2, period_seconds=60.0, cumulative=cumulative)
    basis = Diagnosis(threshold, data, shares, evaluator, plan)  # type: ignore[arg-type]
    opened = basis.open(round, model(0.75))
    examine(opened, {3: 0.5, 1: 1.75}, tmp_path)
    line = opened.conclude(model(1.875))
    assert line is not None
    assert line["label_counts"].tolist() == expected
    assert line["samples"] == 4
    assert line["before"].keys() == {"accuracy", "loss", "class_accuracy", "class_loss"}
    assert known(line["before"]["class_accuracy"]) == [0.5, 1.0]


def test_the_last_ask_of_a_round_counts(tmp_path: Path) -> None:
    round = diagnosis(SHARES, [[], [], [], []]).open(7, model(0.75))
    examine(round, {1: 5.0}, tmp_path)
    examine(round, {3: 0.5, 1: 1.75}, tmp_path)
    line = round.conclude(model(1.875))
    assert line is not None
    assert line["devices"] == (3, 1)
    assert line["weight_divergence"].tolist() == [0.5, 1.75]


def test_a_round_without_models_has_no_line() -> None:
    assert diagnosis(SHARES, [[], [], [], []]).open(1, model(0.0)).conclude(model(1.0)) is None


def revealing(algorithm: Any) -> Any:
    """The algorithm of the plan, with a program that reveals its model."""
    train = type(algorithm.programs["train"])
    told = type("Told", (train,), {"local_model": lambda self, shared, payload: payload["model"]})
    algorithm.programs = {"train": told()}
    return algorithm


@pytest.fixture
def diagnosed(make_plan: MakePlan) -> MakePlan:
    """Makes plans like ``make_plan``, with a diagnosis every round by default. Device i holds training sample i."""

    def make(*arguments: Any, diagnose_every: int = 1, **more: Any) -> CoordinatorPlan:
        plan = make_plan(*arguments, diagnose_every=diagnose_every, classes=3, **more)
        basis = diagnosis([[i] for i in range(6)], [[]] * 6)
        return replace(plan, algorithm=revealing(plan.algorithm), diagnosis=basis)

    return make


def slow_ones_differ(index: int, work: wire.Work) -> Any:
    return {"after": 10.0 + (index + int(work.ask.split(".")[0])) % 6}


async def test_diagnosis_changes_nothing_but_its_log(
    make_plan: MakePlan, diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet(script=slow_ones_differ)
    plain_summary, plain = await play(make_plan("plain"))
    network = MemoryNetwork()
    make_fleet(script=slow_ones_differ, network=network)
    summary, left = await play(diagnosed(network=network))
    assert summary.model_digest == plain_summary.model_digest
    assert not (plain.path / "diagnosis.jsonl").exists()
    assert {row.local_forgetting for row in plain.rows} == {None}
    assert [line["round"] for line in left.diagnosis] == [1, 2, 3, 4]
    for row, line in zip(left.rows, left.diagnosis, strict=True):
        assert row.local_forgetting == line["local_forgetting"]
        assert row.aggregation_forgetting == line["aggregation_forgetting"]
        assert line["locals"]["class_accuracy"][0][2] is None
    for line, following in zip(left.diagnosis, left.diagnosis[1:], strict=False):
        assert line["after"] == following["before"]


async def test_a_line_is_about_the_accepted_devices_in_cohort_order(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet(script=lambda i, work: {"after": 10.0 - i, "reply": "nan" if i == 4 else "good"})
    _, left = await play(diagnosed(rounds=1, over_selection=2.0))
    [line] = left.diagnosis
    assert line["devices"] == [2, 3, 5]
    assert line["label_counts"] == [[1, 0, 0], [0, 1, 0], [1, 0, 0]]
    # Device i moves all of the model by (i + 1) / 8, of which three values are trained.
    assert line["weight_divergence"] == pytest.approx([math.sqrt(3) * (i + 1) / 8 for i in (2, 3, 5)])


async def test_a_device_that_had_nothing_to_train_on_is_not_measured(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet(script=lambda i, work: {"after": 10.0 - i, "reply": "idle" if i == 4 else "good"})
    _, left = await play(diagnosed(rounds=1, over_selection=2.0))
    [line], [row] = left.diagnosis, left.rows
    assert (row.accepted, line["devices"]) == (3, [3, 5])
    assert len(line["locals"]["accuracy"]) == len(line["weight_divergence"]) == 2


async def test_every_third_round_and_the_last_are_diagnosed(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    _, left = await play(diagnosed(rounds=5, diagnose_every=3))
    assert [line["round"] for line in left.diagnosis] == [3, 5]
    assert [row.local_forgetting is None for row in left.rows] == [True, True, False, True, False]


async def test_programs_that_do_not_tell_their_model_are_skipped(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    make_fleet()
    plan = diagnosed(rounds=2)
    del type(plan.algorithm.programs["train"]).local_model  # type: ignore[attr-defined]
    _, left = await play(plan)
    assert left.diagnosis == []
    assert (plan.directory / "diagnosis.jsonl").is_file()


async def test_a_round_that_started_again_is_measured_by_its_last_attempt(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    # The first attempt passes its first ask and fails at the second.
    make_fleet(script=lambda i, work: {"after": 900.0 if work.ask == "1.0.1" else 10.0})
    _, left = await play(diagnosed(rounds=1, asks=2, quorum=1.0))
    assert left.rows[0].attempts == 2
    [line] = left.diagnosis
    assert len(line["devices"]) == 3


async def test_a_run_that_is_killed_and_resumed_leaves_the_same_lines(
    diagnosed: MakePlan, make_fleet: MakeFleet, play: Play
) -> None:
    network = MemoryNetwork()
    make_fleet(script=slow_ones_differ, network=network)
    _, whole = await play(diagnosed("whole", network=network))
    fleet = make_fleet(script=slow_ones_differ)
    first = asyncio.create_task(serve(diagnosed()))
    async with asyncio.timeout(60):
        while not any(ask.startswith("3.") for _, ask in fleet.trained):  # noqa: ASYNC110 - any moment of round 3
            await asyncio.sleep(0.002)
    first.cancel()
    await asyncio.wait({first})
    _, left = await play(diagnosed())
    assert left.diagnosis == whole.diagnosis


async def test_a_line_whose_checkpoint_was_not_written_is_written_once(
    diagnosed: MakePlan, make_fleet: MakeFleet, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    save = checkpoint.save

    def crash(directory: Path, round: int, state: Any, record: dict[str, Any]) -> None:
        if round == 2:
            raise OSError("killed")
        save(directory, round, state, record)

    fleet = make_fleet()
    plan = diagnosed(rounds=3)
    monkeypatch.setattr(checkpoint, "save", crash)
    with pytest.raises(OSError, match="killed"):
        await play(plan)
    assert [line["round"] for line in read_run(plan.directory).diagnosis] == [1, 2]
    monkeypatch.undo()
    network = MemoryNetwork()
    make_fleet(network=network, lease=fleet.granted.lease)
    _, left = await play(diagnosed(rounds=3, network=network))
    assert [line["round"] for line in left.diagnosis] == [1, 2, 3]
