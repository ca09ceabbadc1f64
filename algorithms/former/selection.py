"""``fedemu.algorithms.selection``, a former import place. Selection is in ``fedemu.algorithms.replay.selection``."""

from fedemu.algorithms.replay.selection.at_random import approximation_of_uniform as approximation_of_uniform
from fedemu.algorithms.replay.selection.at_random import fixed_proportion as fixed_proportion
from fedemu.algorithms.replay.selection.at_random import naive_uniform as naive_uniform
from fedemu.algorithms.replay.selection.at_random import none as none
from fedemu.algorithms.replay.selection.at_random import reservoir as reservoir
from fedemu.algorithms.replay.selection.by_class import by_herding as by_herding
from fedemu.algorithms.replay.selection.by_class import class_balanced as class_balanced
from fedemu.algorithms.replay.selection.by_class import class_quotas as class_quotas
from fedemu.algorithms.replay.selection.by_class import herding as herding
from fedemu.algorithms.replay.selection.candidates import Candidates as Candidates
from fedemu.algorithms.replay.selection.candidates import Positions as Positions
from fedemu.algorithms.replay.selection.candidates import Strategy as Strategy
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex as solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import directions as directions
from fedemu.algorithms.replay.selection.diversity import gradient_diversity as gradient_diversity
from fedemu.algorithms.replay.selection.diversity import objective as objective
from fedemu.algorithms.replay.selection.diversity import select_top as select_top
from fedemu.algorithms.replay.selection.diversity import targets as targets
from fedemu.algorithms.replay.selection.gss import by_gss_cluster as by_gss_cluster
from fedemu.algorithms.replay.selection.gss import by_gss_greedy as by_gss_greedy
from fedemu.algorithms.replay.selection.gss import gss_cluster as gss_cluster
from fedemu.algorithms.replay.selection.gss import gss_greedy as gss_greedy
from fedemu.algorithms.replay.selection.selection import STRATEGIES as STRATEGIES
