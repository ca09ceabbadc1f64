"""The names for people who write methods, losses and models: ``from fedemu.algorithms import FedAvg, Ask, Reply``.

``docs/own_methods.md`` lists the names and shows how they work together. Each name is imported when it is asked for, so
that a process without torch stays without it. fedemu itself imports from the rooms, never from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "fedemu.algorithms.interface": (
        "Algorithm Ask Augment Batch Context CountingSteps DeviceReply Facts Forest Handle Kind LOGITS Labelled "
        "LocalProgram Measuring Memory Model Noting OfItsOwnKind Outcome Outputs PartlyFrozen Picturing Plan "
        "PublicData Query REPLAYED Reducer Remarking Reply Revealing Script Selecting ServerJob Stage Step Tree "
        "collect mean total weighted_mean"
    ),
    "fedemu.algorithms.methods.fedavg": "FedAvg FedAvgState",
    "fedemu.algorithms.models.growing": "Growing",
    "fedemu.algorithms.models.layer_statistics": "Observable",
    "fedemu.algorithms.registry": "build_algorithm build_model",
    "fedemu.algorithms.terms.local_term": "Importance LocalTerm PREVIOUS importance_key",
    "fedemu.algorithms.training.adam": "Adam",
    "fedemu.algorithms.training.class_losses": (
        "cross_entropy_among distillation_among feature_distillation new_class_cross_entropy"
    ),
    "fedemu.algorithms.training.ingredients": "Ingredients",
    "fedemu.algorithms.training.local_sgd": (
        "SGD Direction LocalSGD Training first_batches shuffled_epochs shuffled_steps"
    ),
    "fedemu.algorithms.training.job_device": "job_device",
    "fedemu.algorithms.training.losses": (
        "curvature_penalty dynamic_distillation knowledge_weights model_contrastive not_true_distillation "
        "proximal reweighted_cross_entropy"
    ),
    "fedemu.algorithms.training.objective": (
        "Criterion Loss LossFunction Objective Pass Term cross_entropy proximity token_cross_entropy"
    ),
    "fedemu.algorithms.training.server_training": "LessonLoss Optimiser ServerTraining Trained predict",
    "fedemu.algorithms.training.wsm": "reweighted_softmax",
    "fedemu.algorithms.trees": "add flatten map_leaves only scale squared_norm subtract unflatten without zeros_like",
    "fedemu.protocol": "seeds",
    "fedemu.protocol.errors": "ConfigurationError",
    "fedemu.protocol.ids": "DeviceId",
}
"""The public names, each beside the module that holds it."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)
__path__.append(f"{__path__[0]}/former")  # Former import places, such as fedemu.algorithms.losses.


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(__import__(_HOME_OF[name], fromlist=[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:  # The same names once more, for type checkers and editors.
    from fedemu.algorithms.interface import LOGITS as LOGITS
    from fedemu.algorithms.interface import REPLAYED as REPLAYED
    from fedemu.algorithms.interface import Algorithm as Algorithm
    from fedemu.algorithms.interface import Ask as Ask
    from fedemu.algorithms.interface import Augment as Augment
    from fedemu.algorithms.interface import Batch as Batch
    from fedemu.algorithms.interface import Context as Context
    from fedemu.algorithms.interface import CountingSteps as CountingSteps
    from fedemu.algorithms.interface import DeviceReply as DeviceReply
    from fedemu.algorithms.interface import Facts as Facts
    from fedemu.algorithms.interface import Forest as Forest
    from fedemu.algorithms.interface import Handle as Handle
    from fedemu.algorithms.interface import Kind as Kind
    from fedemu.algorithms.interface import Labelled as Labelled
    from fedemu.algorithms.interface import LocalProgram as LocalProgram
    from fedemu.algorithms.interface import Measuring as Measuring
    from fedemu.algorithms.interface import Memory as Memory
    from fedemu.algorithms.interface import Model as Model
    from fedemu.algorithms.interface import Noting as Noting
    from fedemu.algorithms.interface import OfItsOwnKind as OfItsOwnKind
    from fedemu.algorithms.interface import Outcome as Outcome
    from fedemu.algorithms.interface import Outputs as Outputs
    from fedemu.algorithms.interface import PartlyFrozen as PartlyFrozen
    from fedemu.algorithms.interface import Picturing as Picturing
    from fedemu.algorithms.interface import Plan as Plan
    from fedemu.algorithms.interface import PublicData as PublicData
    from fedemu.algorithms.interface import Query as Query
    from fedemu.algorithms.interface import Reducer as Reducer
    from fedemu.algorithms.interface import Remarking as Remarking
    from fedemu.algorithms.interface import Reply as Reply
    from fedemu.algorithms.interface import Revealing as Revealing
    from fedemu.algorithms.interface import Script as Script
    from fedemu.algorithms.interface import Selecting as Selecting
    from fedemu.algorithms.interface import ServerJob as ServerJob
    from fedemu.algorithms.interface import Stage as Stage
    from fedemu.algorithms.interface import Step as Step
    from fedemu.algorithms.interface import Tree as Tree
    from fedemu.algorithms.interface import collect as collect
    from fedemu.algorithms.interface import mean as mean
    from fedemu.algorithms.interface import total as total
    from fedemu.algorithms.interface import weighted_mean as weighted_mean
    from fedemu.algorithms.methods.fedavg import FedAvg as FedAvg
    from fedemu.algorithms.methods.fedavg import FedAvgState as FedAvgState
    from fedemu.algorithms.models.growing import Growing as Growing
    from fedemu.algorithms.models.layer_statistics import Observable as Observable
    from fedemu.algorithms.registry import build_algorithm as build_algorithm
    from fedemu.algorithms.registry import build_model as build_model
    from fedemu.algorithms.terms.local_term import PREVIOUS as PREVIOUS
    from fedemu.algorithms.terms.local_term import Importance as Importance
    from fedemu.algorithms.terms.local_term import LocalTerm as LocalTerm
    from fedemu.algorithms.terms.local_term import importance_key as importance_key
    from fedemu.algorithms.training.adam import Adam as Adam
    from fedemu.algorithms.training.class_losses import cross_entropy_among as cross_entropy_among
    from fedemu.algorithms.training.class_losses import distillation_among as distillation_among
    from fedemu.algorithms.training.class_losses import feature_distillation as feature_distillation
    from fedemu.algorithms.training.class_losses import new_class_cross_entropy as new_class_cross_entropy
    from fedemu.algorithms.training.ingredients import Ingredients as Ingredients
    from fedemu.algorithms.training.job_device import job_device as job_device
    from fedemu.algorithms.training.local_sgd import SGD as SGD
    from fedemu.algorithms.training.local_sgd import Direction as Direction
    from fedemu.algorithms.training.local_sgd import LocalSGD as LocalSGD
    from fedemu.algorithms.training.local_sgd import Training as Training
    from fedemu.algorithms.training.local_sgd import first_batches as first_batches
    from fedemu.algorithms.training.local_sgd import shuffled_epochs as shuffled_epochs
    from fedemu.algorithms.training.local_sgd import shuffled_steps as shuffled_steps
    from fedemu.algorithms.training.losses import curvature_penalty as curvature_penalty
    from fedemu.algorithms.training.losses import dynamic_distillation as dynamic_distillation
    from fedemu.algorithms.training.losses import knowledge_weights as knowledge_weights
    from fedemu.algorithms.training.losses import model_contrastive as model_contrastive
    from fedemu.algorithms.training.losses import not_true_distillation as not_true_distillation
    from fedemu.algorithms.training.losses import proximal as proximal
    from fedemu.algorithms.training.losses import reweighted_cross_entropy as reweighted_cross_entropy
    from fedemu.algorithms.training.objective import Criterion as Criterion
    from fedemu.algorithms.training.objective import Loss as Loss
    from fedemu.algorithms.training.objective import LossFunction as LossFunction
    from fedemu.algorithms.training.objective import Objective as Objective
    from fedemu.algorithms.training.objective import Pass as Pass
    from fedemu.algorithms.training.objective import Term as Term
    from fedemu.algorithms.training.objective import cross_entropy as cross_entropy
    from fedemu.algorithms.training.objective import proximity as proximity
    from fedemu.algorithms.training.objective import token_cross_entropy as token_cross_entropy
    from fedemu.algorithms.training.server_training import LessonLoss as LessonLoss
    from fedemu.algorithms.training.server_training import Optimiser as Optimiser
    from fedemu.algorithms.training.server_training import ServerTraining as ServerTraining
    from fedemu.algorithms.training.server_training import Trained as Trained
    from fedemu.algorithms.training.server_training import predict as predict
    from fedemu.algorithms.training.wsm import reweighted_softmax as reweighted_softmax
    from fedemu.algorithms.trees import add as add
    from fedemu.algorithms.trees import flatten as flatten
    from fedemu.algorithms.trees import map_leaves as map_leaves
    from fedemu.algorithms.trees import only as only
    from fedemu.algorithms.trees import scale as scale
    from fedemu.algorithms.trees import squared_norm as squared_norm
    from fedemu.algorithms.trees import subtract as subtract
    from fedemu.algorithms.trees import unflatten as unflatten
    from fedemu.algorithms.trees import without as without
    from fedemu.algorithms.trees import zeros_like as zeros_like
    from fedemu.protocol import seeds as seeds
    from fedemu.protocol.errors import ConfigurationError as ConfigurationError
    from fedemu.protocol.ids import DeviceId as DeviceId
