"""Coordinated selection over given gradients: the sums, the targets, and devices that drop out or come late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedemu.algorithms.interface import Batch, Context, Memory, Tree
from fedemu.algorithms.replay import replay
from fedemu.algorithms.replay.coordination import CoordinatedSelect, GradientSum
from fedemu.algorithms.replay.queries import Census
from fedemu.algorithms.replay.replay import Replay
from fedemu.algorithms.replay.selection.candidates import Candidates
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import directions, gradient_diversity, select_top, targets
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.device.compute.executors.query import PURPOSE
from fedemu.protocol.seeds import generator

WIDTH = 7
BUDGET = 3
SEED = 5
SHARES = [np.arange(0, 9), np.arange(20, 27), np.arange(300, 340), np.arange(60, 62), np.arange(80, 80)]
"""The last two devices have fewer samples than the budget, and none."""
ALL = list(range(len(SHARES)))
STREAM = [SHARES, *([np.arange(100 * t + 20 * i, 100 * t + 20 * i + 5) for i in ALL] for t in (1, 2))]
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
SOLVED: dict[str, Any] = {"rtol": 5e-3, "atol": 5e-3}
"""The largest difference that the solver's tolerance may make between two sums ``G x`` with rounded inputs."""


def given_gradients() -> Any:
    """``[400, WIDTH]``: around a common direction and one of each device, so that there is something to coordinate.

    One is 0, and two are the same.
    """
    random = np.random.default_rng(4)
    apart = np.repeat(random.normal(size=(20, WIDTH)), 20, axis=0)
    rows = random.normal(size=(400, WIDTH)) + 0.7 * apart + 0.5
    rows[1] = 0.0
    rows[22] = rows[21]
    return directions(rows)


GRADIENTS = given_gradients()


class Given:
    """Gradients by the samples' indices, in place of a model's."""

    model = SimpleNamespace(buffers=frozenset())

    def directions(self, memory: Memory, shared: Any, facts: Any) -> Any:
        rows = GRADIENTS[memory.indices]
        return SimpleNamespace(
            gram=rows @ rows.T,
            products=lambda aim: rows @ aim["w"].numpy(),
            weighted_sum=lambda x: {"w": torch.from_numpy(rows.T @ x)},
        )


class Idle:
    """A method that asks no device."""

    programs: Mapping[str, Any] = {}

    def init(self, variables: Tree, context: Context) -> Tree:
        return variables

    def round(self, state: Tree, context: Context) -> Any:
        yield from ()
        return state

    def variables(self, state: Tree) -> Tree:
        return state


LENS: Any = Given()
NO_FACTS: Any = None


@pytest.fixture(autouse=True)
def _given_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "Lens", lambda *arguments: LENS)


def selecting() -> CoordinatedSelect:
    return CoordinatedSelect(LENS, gradient_diversity(), Census(0, 3), False, restarts=3)


def coordinated(iterations: int = 1, form: Any = "mean", final: Any = "zero_diagonal") -> Replay[Any]:
    settings = ReplaySettings("coordinated", BUDGET, iterations=iterations, targets=form, final=final, periods=3)
    ingredients: Any = SimpleNamespace(model=None, criterion=None, labelled=False)
    return replay.with_replay(Idle(), settings, ingredients)


@pytest.fixture
def begun(little_fleet: Callable[..., Any]) -> Callable[..., Any]:
    """The fleet before its first round; every round ends a period."""

    def begin(algorithm: Replay[Any], stream: Any = STREAM, budget: int = BUDGET) -> Any:
        variables = {"w": torch.zeros(WIDTH, dtype=torch.float64)}
        return little_fleet(algorithm, variables, [], stream=stream, budget=budget, seed=SEED)

    return begin


@pytest.fixture
def played(begun: Callable[..., Any]) -> Callable[..., Any]:
    """The fleet after the end of its first period; ``online`` as in LittleFleet."""

    def play(algorithm: Replay[Any], online: Sequence[Sequence[int]] | None = None, **fields: Any) -> Any:
        fleet = begun(algorithm, **fields)
        fleet.play([], online=online)
        return fleet

    return play


def remarks(fleet: Any) -> Any:
    return fleet.algorithm.remarks(fleet.state)["coordination"]


def kept(fleet: Any) -> dict[int, list[int]]:
    return {device: buffer.indices.tolist() for device, buffer in sorted(fleet.buffers.items())}


def draws(device: int, period: int = 0) -> np.random.Generator:
    return generator(SEED, round=period, device=device, purpose=PURPOSE)


def alone(device: int, final: str = "zero_diagonal") -> list[int]:
    """What a device keeps of the first period without coordination."""
    rows = GRADIENTS[SHARES[device]]
    candidates = Candidates(np.ones(len(rows), bool), len(rows), gram=lambda: rows @ rows.T)
    positions = gradient_diversity(final == "zero_diagonal")(candidates, BUDGET, draws(device))
    return SHARES[device][positions].tolist()


def relaxed(device: int, aim: Any = 0.0, start: Any = None) -> Any:
    rows = GRADIENTS[SHARES[device]]
    return solve_capped_simplex(rows @ rows.T, BUDGET, rows @ (aim + np.zeros(WIDTH)), start=start)


@pytest.mark.parametrize("form", ["mean", "each"])
def test_the_exchange_is_algorithm_1_of_the_paper(played: Any, form: str) -> None:
    aims, xs, expected = [np.zeros(WIDTH) for _ in ALL], [None for _ in ALL], []
    for _ in range(4):
        xs = [relaxed(m, aims[m], xs[m] if len(SHARES[m]) > BUDGET else None) for m in ALL]
        sums = [GRADIENTS[SHARES[m]].T @ xs[m] for m in ALL]
        expected.append(float(np.square(np.sum(sums, axis=0)).sum()))
        aims = list(targets(sums))
    fleet = played(coordinated(4, form))
    assert remarks(fleet)["devices"] == len(ALL)
    np.testing.assert_allclose(remarks(fleet)["objective"], expected, rtol=1e-5)
    for m in (0, 1, 2):
        rows = GRADIENTS[SHARES[m]]
        final = {"zero_diagonal": True, "restarts": 3, "generator": draws(m)}
        x = solve_capped_simplex(rows @ rows.T, BUDGET, rows @ aims[m], **final)
        assert kept(fleet)[m] == SHARES[m][select_top(x, BUDGET)].tolist()
    assert kept(fleet)[3] == [60, 61]
    assert kept(fleet)[4] == []


def test_the_objective_never_rises_when_all_answer(played: Any) -> None:
    found = remarks(played(coordinated(12)))["objective"]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(found))
    assert found[-1] < 0.8 * found[0]


def test_the_convex_end_keeps_the_largest_of_one_more_iteration(played: Any) -> None:
    fleet = played(coordinated(2, final="convex"))
    mean = fleet.asks[-1].shared["mean"]["w"].numpy()
    first, second = relaxed(0), sums_so_far(fleet)[-1][0]
    start = relaxed(0, GRADIENTS[SHARES[0]].T @ first - fleet.asks[1].shared["mean"]["w"].numpy(), first)
    assert kept(fleet)[0] == SHARES[0][select_top(relaxed(0, second - mean, start), BUDGET)].tolist()


def sums_so_far(fleet: Any) -> list[dict[int, Any]]:
    """The sums of the devices that had answered before the first, second, ... ask, from the changes they sent."""
    known: dict[int, Any] = {}
    history = [dict(known)]
    for answers in fleet.sent[:-1]:
        for device, payload in answers.items():
            known[device] = known.get(device, 0.0) + payload["change"]["w"].numpy()
        history.append(dict(known))
    return history


someone = st.sets(st.sampled_from(ALL)).map(sorted)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(asked=st.lists(someone, min_size=1, max_size=4))
def test_targets_add_up_to_0_whichever_device_drops_out(played: Any, asked: Any) -> None:
    by_mean, by_each = (played(coordinated(len(asked), form), [*asked, ALL]) for form in ("mean", "each"))
    for ask, other, known in zip(by_mean.asks, by_each.asks, sums_so_far(by_mean), strict=True):
        assert other.each.keys() == known.keys()
        assert ("mean" in ask.shared) == bool(known)
        if known:
            mean = ask.shared["mean"]["w"].numpy()
            np.testing.assert_allclose(sum(own - mean for own in known.values()), np.zeros(WIDTH), atol=1e-12)
            np.testing.assert_allclose(sum(other.each[m]["w"] for m in known), np.zeros(WIDTH), atol=1e-12)
            for device, own in known.items():
                np.testing.assert_allclose(other.each[device]["w"], own - mean, **SOLVED)
    assert remarks(by_mean)["devices"] == remarks(by_each)["devices"] == len(set().union(*asked))
    np.testing.assert_allclose(remarks(by_mean)["objective"], remarks(by_each)["objective"], **SOLVED)


def test_a_device_that_first_answers_in_the_second_iteration_aims_at_0_and_counts_from_then_on(played: Any) -> None:
    fleet = played(coordinated(2), [[0, 1], [0, 2], ALL])
    np.testing.assert_allclose(sums_so_far(fleet)[-1][2], GRADIENTS[SHARES[2]].T @ relaxed(2), **EXACT)
    joined = [{m: int(payload["joined"]["devices"]) for m, payload in sent.items()} for sent in fleet.sent[:2]]
    assert joined == [{0: 1, 1: 1}, {0: 0, 2: 1}]
    assert (remarks(fleet)["devices"], remarks(fleet)["answered"]) == (3, [2, 3])
    np.testing.assert_allclose(fleet.asks[-1].shared["mean"]["w"], sum(sums_so_far(fleet)[-1].values()) / 3, **EXACT)


@pytest.mark.parametrize("final", ["zero_diagonal", "convex"])
def test_without_iterations_devices_select_as_without_coordination(played: Any, final: str) -> None:
    fleet = played(coordinated(0, final=final))
    assert remarks(fleet) == {"devices": 0, "answered": [], "objective": []}
    assert kept(fleet) == {device: alone(device, final) for device in ALL}


def test_one_device_alone_selects_as_without_coordination(played: Any) -> None:
    fleet = played(coordinated(3), stream=[SHARES[:1], STREAM[1][:1]])
    assert kept(fleet) == {0: alone(0)}
    assert len({round(value, 9) for value in remarks(fleet)["objective"]}) == 1


def test_a_budget_of_0_keeps_nothing(played: Any) -> None:
    fleet = played(coordinated(2), budget=0)
    assert kept(fleet) == {device: [] for device in ALL}
    assert remarks(fleet) == {"devices": 5, "answered": [5, 5], "objective": [0.0, 0.0]}


@pytest.mark.parametrize("form", ["mean", "each"])
def test_an_exchange_with_no_device_on_line_has_no_answers(played: Any, form: str) -> None:
    fleet = played(coordinated(2, form), [[], [], []])
    assert fleet.algorithm.remarks(fleet.state) == {
        "replay": {"period": 0, "devices": 0, "samples": 0, "objective": 0.0, "periods": [0, 0, 0]},
        "coordination": {"devices": 0, "answered": [0, 0], "objective": [0.0, 0.0]},
    }
    assert kept(fleet) == {}


def test_coordination_lowers_the_objective_of_what_the_fleet_keeps(played: Any) -> None:
    objectives = []
    for iterations in (0, 8):
        fleet = played(coordinated(iterations))
        rows = GRADIENTS[[i for indices in kept(fleet).values() for i in indices]]
        objectives.append(fleet.algorithm.remarks(fleet.state)["replay"]["objective"])
        assert objectives[-1] == pytest.approx(float(np.square(rows.sum(0)).sum()), rel=1e-9)
    assert objectives[1] < 0.9 * objectives[0]


def test_a_device_that_comes_only_to_select_selects_alone(played: Any) -> None:
    fleet = played(coordinated(2), [[0, 1], [0, 1], [0, 1, 2]])
    assert kept(fleet)[2] == alone(2)


@pytest.mark.parametrize("form", ["mean", "each"])
def test_a_device_that_answered_but_was_away_at_the_end_keeps_the_largest_of_its_last_x(begun: Any, form: str) -> None:
    fleet = begun(coordinated(1, form))
    fleet.play([], online=[[0, 1, 2], [0, 1]])
    assert kept(fleet)[2] == []
    # Its next work is in the middle of the next exchange, whose targets are not for the samples that it has sealed.
    fleet.algorithm = coordinated(2, form)
    fleet.play([], online=[[0, 1], [2], []])
    assert fleet.buffers[2].indices.tolist() == SHARES[2][select_top(relaxed(2), BUDGET)].tolist()
    assert fleet.buffers[2].period == 1


def test_a_device_that_was_away_for_the_whole_exchange_selects_alone_at_its_next_work(begun: Any) -> None:
    fleet = begun(coordinated(1))
    fleet.play([], online=[[0, 1], [0, 1]])
    assert 2 not in fleet.buffers
    fleet.play([], online=[[2], []])
    assert fleet.buffers[2].indices.tolist() == alone(2)


def test_samples_that_arrive_after_an_answer_come_after_all_samples_of_the_answer() -> None:
    own = {"x": torch.tensor([0.0, 0.4, 0.6, 0.0], dtype=torch.float64)}
    kept = selecting().choose(memory(6, 1), {}, own, NO_FACTS)
    assert kept.tolist() == [2]
    assert selecting().choose(memory(6, 5), {}, own, NO_FACTS).tolist() == [0, 1, 2, 3, 4]
    # The next answer is of all samples, and begins anew.
    outcome, _ = GradientSum(LENS, "each").ask(memory(6, 1), {}, own, NO_FACTS)
    rows = GRADIENTS[:6]
    assert outcome.own["x"].tolist() == solve_capped_simplex(rows @ rows.T, 1).tolist()


def memory(size: int, budget: int) -> Memory:
    batch = Batch(torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64), torch.ones(size))
    fresh, periods = np.ones(size, dtype=bool), np.zeros(size, dtype=np.int64)
    return Memory(batch, np.arange(size), fresh, periods, 0, budget, size, np.random.default_rng(0))
