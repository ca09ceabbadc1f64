"""How good the selections of replay samples are: against the best subset, and over devices that coordinate.

Repeats figure 1 of Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", with every
strategy, follows the objective of their algorithm 1 over its iterations, and compares our solver with cvxpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console, Group
from rich.table import Table

from fedemu.algorithms.replay.selection.candidates import Strategy
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import RESTARTS, gradient_diversity, objective, select_top, targets
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.ops.bench.measuring.measure import Effort, Tell
from fedemu.ops.bench.selection.data import Floats, Size, candidates, cosines, fleet, least_objective, mixture
from fedemu.ops.bench.selection.solvers import EXPLANATION, SolverComparison, compare_solvers
from fedemu.protocol import seeds

DEVICES: Final = 100
MANY_DEVICES: Final = 1000
SHOWN: Final = (0, 1, 4, 16)
"""The iterations of the coordination whose objective is shown."""
FLEETS: Final = {"as in the paper": (0.0, 0.0), "shifted": (0.3, 0.7)}
"""How far the vectors are moved from a mean of zero: those of all devices together, and those of each device."""

QUALITY: Final = (
    "The sum of the cosines of all pairs of kept vectors, divided by the least sum of all subsets: 1 is the best. The "
    "medians are expected to have this order: diversity < gss_greedy, gss_cluster < naive_uniform. The convex "
    "relaxation isn't expected to beat a random choice here: these vectors add up to zero, so that x in proportion to "
    "their norms has the objective 0, and its largest are the vectors with the largest norms, whatever their "
    "directions. There is no buffer yet, so approximation_of_uniform, fixed_proportion and reservoir are uniform draws "
    "too."
)
COORDINATION: Final = (
    "The squared norm of the sum over all devices' kept vectors, divided by that of the uncoordinated selection (the "
    "relaxation without diagonal). relaxed: with the x of the convex relaxation, before any choice; top N: with its N "
    "largest; final: the devices choose without diagonal against the targets so far. In the paper's data each device's "
    "relaxed sum is 0 from the start, which leaves nothing to coordinate. In the shifted data all vectors are moved by "
    "0.3 times a random vector, and each device's vectors by 0.7 times another one."
)


@dataclass(frozen=True)
class Quartiles:
    """How the values of one figure are spread over the problems."""

    least: float
    lower: float
    median: float
    upper: float
    most: float


@dataclass(frozen=True)
class Step:
    """The objective after one iteration, in multiples of that of the uncoordinated selection.

    ``drift`` is the norm of the targets' sum, divided by the sum of their norms. ``descends`` says whether
    ``S_{t+1} <= M sum_m ||G_m x_m - h_m||^2 <= S_t`` at every iteration so far, where S is the objective of the relaxed
    x.
    """

    data: str
    devices: int
    iteration: int
    relaxed: float
    top: float
    final: float
    drift: float
    descends: bool


@dataclass(frozen=True)
class Study:
    """The results: quartiles of the ratios by strategy, the steps of the coordination, and the solvers compared."""

    problems: int
    ratios: Mapping[str, Quartiles]
    steps: list[Step]
    solvers: list[SolverComparison]

    @property
    def as_expected(self) -> bool:
        """Whether the medians rise from the relaxation without diagonal over GSS to the random choice."""
        medians = {name: ratio.median for name, ratio in self.ratios.items()}
        gss = medians["gss_greedy"], medians["gss_cluster"]
        return medians["diversity"] < min(gss) and max(gss) < medians["naive_uniform"]

    def table(self) -> dict[str, Any]:
        """The study for JSON."""
        ratios = [{"ratio": each.ratio, "ratio_alone": each.ratio_alone} for each in self.solvers]
        solvers = [asdict(each) | ratio for each, ratio in zip(self.solvers, ratios, strict=True)]
        return asdict(self) | {"as_expected": self.as_expected, "solvers": solvers}

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Group]:
        ratios = _table(f"problems: {self.problems}", "least", "lower quartile", "median", "upper quartile", "most")
        for name, ratio in self.ratios.items():
            ratios.add_row(name, *(f"{value:.3f}" for value in asdict(ratio).values()))
        steps = _table("data", "devices", "iteration", "relaxed", "top N", "final", "sum of targets", "descends")
        for step in self.steps:
            steps.add_row(
                step.data,
                str(step.devices),
                str(step.iteration),
                *(f"{value:.3f}" for value in (step.relaxed, step.top, step.final)),
                f"{step.drift:.0e}",
                "yes" if step.descends else "[bold red]no[/]",
            )
        result = "[green]reached[/]" if self.as_expected else "[bold red]missed[/]"
        yield Group(ratios, f"{QUALITY} Here: {result}.", "", steps, COORDINATION, "")
        yield Group(_solver_table(self.solvers), EXPLANATION)


def study(effort: Effort, problems: int, tell: Tell, size: Size | None = None) -> Iterator[Study]:
    """Measure the strategies, the coordination and the solvers. The study as it grows.

    With ``effort.large`` fleets of 1,000 devices are measured too, which take a minute or two each.
    """
    size = size or Size()
    count = effort.count(problems)
    ratios = _ratios(count, size, tell)
    fleets = [effort.count(DEVICES), *([MANY_DEVICES] if effort.large else [])]
    steps: list[Step] = []
    solvers: list[SolverComparison] = []
    yield Study(count, ratios, steps, solvers)
    for devices in fleets:
        for data in FLEETS:
            for step in coordination(data, devices, size, tell):
                steps.append(step)
                yield Study(count, ratios, steps, solvers)
    for solver in compare_solvers(effort, fleets, size, tell):
        solvers.append(solver)
        yield Study(count, ratios, steps, solvers)


def _ratios(problems: int, size: Size, tell: Tell) -> dict[str, Quartiles]:
    """The ratios of each strategy's objective to the least one. The strategy that keeps nothing is left out."""
    strategies: dict[str, Strategy] = {name: each for name, each in STRATEGIES.items() if name != "none"}
    strategies |= {
        "diversity, no restarts": gradient_diversity(restarts=0),
        "diversity, 10 restarts": gradient_diversity(restarts=10),
    }
    found: dict[str, list[float]] = {name: [] for name in strategies}
    for problem in range(problems):
        if problem % max(1, problems // 10) == 0:
            tell(f"selection: problem {problem + 1} of {problems}")
        vectors, origins = mixture(size, seeds.generator(0, round=problem, purpose="bench/mixture"))
        gram = cosines(vectors)
        offered = candidates(vectors, origins, gram)
        least = least_objective(gram, size.budget)
        for name, strategy in strategies.items():
            kept = strategy(offered, size.budget, seeds.generator(0, round=problem, purpose=f"bench/{name}"))
            found[name].append(objective(gram, kept) / least)
    return {name: Quartiles(*np.quantile(of, [0.0, 0.25, 0.5, 0.75, 1.0]).tolist()) for name, of in found.items()}


def coordination(data: str, devices: int, size: Size, tell: Tell) -> Iterator[Step]:
    """The iterations of algorithm 1 over one fleet. Each device begins from its last x."""
    rows = fleet(devices, size, *FLEETS[data], seeds.generator(0, purpose=f"bench/fleet/{data}"))
    aims = np.zeros((devices, size.dimensions))
    alone = _shared(_chosen(rows, aims, size.budget))
    x = np.full((devices, size.samples), size.budget / size.samples)
    before, descends = np.inf, True
    for iteration in range(max(SHOWN) + 1):
        if iteration % 4 == 0:
            tell(f"selection: {devices} devices, {data}, iteration {iteration} of {max(SHOWN)}")
        x = np.array(
            [
                solve_capped_simplex(own @ own.T, size.budget, own @ aim, start=last)
                for own, aim, last in zip(rows, aims, x, strict=True)
            ]
        )
        sums = np.einsum("mn,mnd->md", x, rows)
        shared, apart = _shared(sums), devices * float(np.square(sums - aims).sum())
        slack = 1e-9 * alone
        descends &= shared <= apart + slack and apart <= before + slack
        if iteration in SHOWN:
            top = np.array([own[select_top(each, size.budget)].sum(axis=0) for own, each in zip(rows, x, strict=True)])
            final = _chosen(rows, aims, size.budget)
            drift = np.linalg.norm(aims.sum(axis=0)) / (np.linalg.norm(aims, axis=1).sum() or 1.0)
            yield Step(
                data=data,
                devices=devices,
                iteration=iteration,
                relaxed=shared / alone,
                top=_shared(top) / alone,
                final=_shared(final) / alone,
                drift=float(drift),
                descends=descends,
            )
        aims, before = targets(sums), shared


def _chosen(rows: Floats, aims: Floats, budget: int) -> Floats:
    """The sums ``[devices, dimensions]`` of the vectors that each device keeps, without diagonal, for its target."""
    sums = []
    for device, (own, aim) in enumerate(zip(rows, aims, strict=True)):
        draws = seeds.generator(0, device=device, purpose="bench/restarts")
        x = solve_capped_simplex(own @ own.T, budget, own @ aim, zero_diagonal=True, restarts=RESTARTS, generator=draws)
        sums.append(own[select_top(x, budget)].sum(axis=0))
    return np.array(sums)


def _shared(sums: Floats) -> float:
    """The coordinated objective, problem 6."""
    return float(np.square(sums.sum(axis=0)).sum())


def _table(first: str, *columns: str) -> Table:
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column(first)
    for column in columns:
        drawn.add_column(column, justify="right")
    return drawn


def _solver_table(solvers: list[SolverComparison]) -> Table:
    """A line for each solver and kind of problem, as EXPLANATION describes it."""
    columns = ("cvxpy with", "ours", "cvxpy", "ratio", "solver alone", "ratio", "objective", "broken")
    drawn = _table("samples, dimensions", "problems", *columns)
    for each in solvers:
        drawn.add_row(
            f"{each.size.samples:,}, {each.size.dimensions:,}",
            f"{each.problems:,}",
            each.other,
            _three_digits(1000 * each.ours),
            _three_digits(1000 * each.seconds),
            _three_digits(each.ratio),
            _three_digits(1000 * each.alone),
            _three_digits(each.ratio_alone),
            f"{each.below:.0e} to {each.above:.0e}",
            f"{each.ours_broken:.0e}, {each.other_broken:.0e}",
        )
    return drawn


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
