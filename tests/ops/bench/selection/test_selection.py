"""``fedemu bench selection``: its data, its optimum, and what it says, at tiny sizes."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from fedemu.algorithms.replay.selection.diversity import objective
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.ops.bench.measuring.measure import QUICK, Effort
from fedemu.ops.bench.selection import selection, solvers
from fedemu.ops.bench.selection.data import Size, cosines, fleet, least_objective, mixture
from fedemu.ops.bench.selection.selection import Quartiles, Study, coordination, study
from fedemu.ops.cli.commands import app

TINY = Size(samples=10, budget=3, dimensions=12)


@pytest.fixture(autouse=True)
def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solvers, "MANY_SAMPLES", (Size(samples=12, budget=3, dimensions=4),))


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("samples", "budget"), [(8, 3), (8, 5), (6, 6)])
def test_the_optimum_is_that_of_trying_every_subset(samples: int, budget: int) -> None:
    vectors, _ = mixture(Size(samples, budget, 5), draws())
    gram = cosines(vectors) + np.diag(np.arange(samples, dtype=float))
    tried = [objective(gram, subset) for subset in combinations(range(samples), budget)]
    assert least_objective(gram, budget) == pytest.approx(min(tried))


def test_the_mixture_has_mean_0_and_deviation_1_in_every_dimension() -> None:
    for seed in range(20):
        vectors, origins = mixture(TINY, draws(seed))
        assert vectors.mean(axis=0) == pytest.approx(np.zeros(12), abs=1e-12)
        assert vectors.std(axis=0) == pytest.approx(np.ones(12))
        assert origins.shape == (10,)


def test_a_fleet_has_directions_that_a_shift_brings_together() -> None:
    paper = fleet(4, TINY, 0.0, 0.0, draws())
    shifted = fleet(4, TINY, 3.0, 0.0, draws())
    assert paper.shape == (4, 10, 12)
    assert np.linalg.norm(paper, axis=2) == pytest.approx(np.ones((4, 10)))
    assert np.linalg.norm(shifted.sum(axis=(0, 1))) > 3 * np.linalg.norm(paper.sum(axis=(0, 1)))


def test_every_strategy_is_compared_with_the_optimum() -> None:
    told: list[str] = []
    *_, found = study(Effort(scale=0.03), 70, told.append, TINY)
    assert found.problems == 2
    assert set(found.ratios) == set(STRATEGIES) - {"none"} | {"diversity, no restarts", "diversity, 10 restarts"}
    for ratio in found.ratios.values():
        assert 1.0 - 1e-9 <= ratio.least <= ratio.lower <= ratio.median <= ratio.upper <= ratio.most
    assert told[:2] == ["selection: problem 1 of 2", "selection: problem 2 of 2"]
    assert told[2] == "selection: 3 devices, as in the paper, iteration 0 of 16"
    said = json.loads(json.dumps(found.table()))
    assert said["steps"][0]["devices"] == 3
    assert [each["other"] for each in said["solvers"]] == ["CLARABEL", "OSQP"] * 2
    assert said["solvers"][0]["size"] == {"samples": 10, "budget": 3, "dimensions": 12}


def test_the_coordination_descends_to_below_the_uncoordinated_objective() -> None:
    steps = list(coordination("shifted", 6, TINY, lambda line: None))
    assert [step.iteration for step in steps] == [0, 1, 4, 16]
    assert all(step.descends and step.drift < 1e-12 for step in steps)
    assert all(later.relaxed <= earlier.relaxed for earlier, later in pairwise(steps))
    assert steps[0].final == 1.0
    assert steps[-1].relaxed < 1.0


def test_where_a_devices_vectors_add_up_to_zero_there_is_nothing_to_coordinate() -> None:
    steps = list(coordination("as in the paper", 3, Size(20, 3, 12), lambda line: None))
    assert [step.top for step in steps] == [steps[0].top] * 4


@pytest.mark.parametrize(("greedy", "random", "expected"), [(1.5, 2.0, True), (1.05, 2.0, False), (2.5, 2.0, False)])
def test_the_expected_order_is_that_of_the_medians(greedy: float, random: float, expected: bool) -> None:
    medians = {"diversity": 1.1, "gss_greedy": greedy, "gss_cluster": 1.4, "naive_uniform": random}
    assert Study(1, {name: Quartiles(1, 1, of, 9, 9) for name, of in medians.items()}, [], []).as_expected is expected


def test_the_command_shows_the_study_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selection.study
    monkeypatch.setattr(selection, "study", lambda effort, problems, tell: whole(QUICK, problems // 10, tell, TINY))
    monkeypatch.setattr(selection, "DEVICES", 20)
    result = CliRunner().invoke(app, ["bench", "selection", "--problems", "100", "--format", "json"])
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["figures"] == []
    assert said["selection"]["problems"] == 1
    assert len(said["selection"]["steps"]) == 8
    text = " ".join(result.stderr.split())
    assert "problems: 1 least lower quartile median upper quartile most naive_uniform" in text
    assert "isn't expected to beat a random choice" in text
    assert "samples, dimensions problems cvxpy with ours cvxpy ratio solver alone ratio objective broken" in text
    assert said["selection"]["solvers"][0]["problems"] == 2
    assert "wanted" not in text
