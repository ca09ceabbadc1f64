"""The table of all strategies by which a device selects the samples that it keeps.

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
from fedemu.algorithms.replay.selection.branch_and_bound import by_gss_iqp
from fedemu.algorithms.replay.selection.by_class import by_herding, class_balanced
from fedemu.algorithms.replay.selection.candidates import Strategy
from fedemu.algorithms.replay.selection.diversity import gradient_diversity
from fedemu.algorithms.replay.selection.gss import by_gss_cluster, by_gss_greedy

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
