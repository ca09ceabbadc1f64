"""``fedemu.algorithms.generator``, a former import place, now ``fedemu.algorithms.incremental.generator.training``."""

from fedemu.algorithms.incremental.generator.losses import batch_statistics_loss as batch_statistics_loss
from fedemu.algorithms.incremental.generator.losses import image_prior_loss as image_prior_loss
from fedemu.algorithms.incremental.generator.losses import information_entropy_loss as information_entropy_loss
from fedemu.algorithms.incremental.generator.training import CHECKPOINT_EVERY as CHECKPOINT_EVERY
from fedemu.algorithms.incremental.generator.training import STRIDE as STRIDE
from fedemu.algorithms.incremental.generator.training import Entropy as Entropy
from fedemu.algorithms.incremental.generator.training import GeneratorSettings as GeneratorSettings
from fedemu.algorithms.incremental.generator.training import GeneratorTraining as GeneratorTraining
from fedemu.algorithms.incremental.generator.training import Targets as Targets
from fedemu.algorithms.incremental.generator.training import intended_classes as intended_classes
from fedemu.algorithms.training.class_losses import feature_distillation as feature_distillation
from fedemu.algorithms.training.class_losses import new_class_cross_entropy as new_class_cross_entropy
