"""``fedemu.algorithms.metrics``, a former import place, now ``fedemu.algorithms.measures.forgetting``."""

from fedemu.algorithms.measures.forgetting import Floats as Floats
from fedemu.algorithms.measures.forgetting import accuracy_lost as accuracy_lost
from fedemu.algorithms.measures.forgetting import diversity_of_norms as diversity_of_norms
from fedemu.algorithms.measures.forgetting import forgetting as forgetting
from fedemu.algorithms.measures.forgetting import gradient_diversity as gradient_diversity
from fedemu.algorithms.measures.forgetting import in_local as in_local
from fedemu.algorithms.measures.forgetting import local_forgetting as local_forgetting
from fedemu.algorithms.measures.forgetting import mean_known as mean_known
from fedemu.algorithms.measures.forgetting import mean_local_forgetting as mean_local_forgetting
from fedemu.algorithms.measures.forgetting import out_local as out_local
from fedemu.algorithms.measures.forgetting import over_distribution as over_distribution
from fedemu.algorithms.measures.forgetting import round_forgetting as round_forgetting
from fedemu.algorithms.measures.forgetting import weight_alignment as weight_alignment
from fedemu.algorithms.measures.forgetting import weight_divergence as weight_divergence
