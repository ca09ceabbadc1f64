"""``fedemu.algorithms.losses``, a former import place. The losses are in ``fedemu.algorithms.training.losses``."""

from fedemu.algorithms.training.losses import SMALLEST_NORM as SMALLEST_NORM
from fedemu.algorithms.training.losses import curvature_penalty as curvature_penalty
from fedemu.algorithms.training.losses import dynamic_distillation as dynamic_distillation
from fedemu.algorithms.training.losses import knowledge_weights as knowledge_weights
from fedemu.algorithms.training.losses import model_contrastive as model_contrastive
from fedemu.algorithms.training.losses import not_true_distillation as not_true_distillation
from fedemu.algorithms.training.losses import proximal as proximal
from fedemu.algorithms.training.losses import reweighted_cross_entropy as reweighted_cross_entropy
from fedemu.algorithms.training.losses import unchecked_reweighted_cross_entropy as unchecked_reweighted_cross_entropy
