"""The selection of samples that a device keeps: the table of all strategies, and the names of this room in one place.

A strategy takes ``Candidates``, a budget and a generator, and returns ascending positions. It never returns more than
the budget. It returns all candidates if the budget allows it (except ``none``), and the same for the same state of the
generator. Each kind of strategy has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fedemu.algorithms.replay.selection.at_random import (
    approximation_of_uniform,
    fixed_proportion,
    naive_uniform,
    none,
    reservoir,
)
from fedemu.algorithms.replay.selection.branch_and_bound import by_gss_iqp, least_cosines
from fedemu.algorithms.replay.selection.by_class import by_herding, class_balanced, class_quotas, herding
from fedemu.algorithms.replay.selection.candidates import Candidates, Positions, Strategy
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import directions, gradient_diversity, objective, select_top, targets
from fedemu.algorithms.replay.selection.gss import by_gss_cluster, by_gss_greedy, gss_cluster, gss_greedy

__all__ = [
    "STRATEGIES",
    "Candidates",
    "Positions",
    "Strategy",
    "approximation_of_uniform",
    "by_gss_cluster",
    "by_gss_greedy",
    "by_gss_iqp",
    "by_herding",
    "class_balanced",
    "class_quotas",
    "directions",
    "fixed_proportion",
    "gradient_diversity",
    "gss_cluster",
    "gss_greedy",
    "herding",
    "least_cosines",
    "naive_uniform",
    "none",
    "objective",
    "reservoir",
    "select_top",
    "solve_capped_simplex",
    "targets",
]

STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "none": none,
        "naive_uniform": naive_uniform,
        "approximation_of_uniform": approximation_of_uniform,
        "fixed_proportion": fixed_proportion(0.5),
        "reservoir": reservoir,
        "class_balanced": class_balanced,
        "herding": by_herding,
        "gss_greedy": by_gss_greedy,
        "gss_cluster": by_gss_cluster,
        "gss_iqp": by_gss_iqp,
        "diversity_convex": gradient_diversity(zero_diagonal=False),
        "diversity": gradient_diversity(),
    }
)
"""Every strategy with its defaults, by name."""
