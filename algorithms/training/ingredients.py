"""What a method is built from, and the errors for what it cannot be built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from fedemu.algorithms.interface import Augment, Model, Outputs
from fedemu.algorithms.models.growing import MOST_HEAT, Growing
from fedemu.algorithms.models.layer_statistics import WATCHED
from fedemu.algorithms.training.asymmetric import AsymmetricCrossEntropy
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import (
    Criterion,
    Objective,
    Term,
    cross_entropy,
    loss_with_terms,
    token_cross_entropy,
)
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError

P = TypeVar("P", bound=LocalSGD)


@dataclass(frozen=True)
class Ingredients:
    """The model, the criterion, how devices train, and what is known of the fleet and the data.

    With ``rounds_per_task`` above 0 the learning rate begins anew with each task; a task has this number of rounds.
    ``devices`` is the size of the fleet, ``public`` says whether there is public data (``Context.public``),
    ``input_shape`` is the shape of one sample, ``labelled`` says whether samples have labels, and ``language`` whether
    they are texts whose tokens are predicted. With ``tokens`` samples are whole numbers that name something, with or
    without labels. ``kept`` is the number of samples of earlier periods that a device's replay buffer keeps; None if it
    is not known. With ``local_steps`` above 0 devices take this number of steps in a round, whatever ``epochs`` says.
    With ``cumulative`` devices hold the samples of all periods so far.
    ``terms`` are local terms, which every program adds to its loss, and ``notes`` are the shapes of what programs ask
    to know of samples (``Noting``).
    """

    model: Model
    criterion: Criterion
    classes: int
    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    augment: Augment | None = None
    devices: int = 0
    public: bool = False
    input_shape: tuple[int, ...] = ()
    labelled: bool = True
    language: bool = False
    tokens: bool = False
    rounds_per_task: int = 0
    kept: int | None = None
    cumulative: bool = False
    local_steps: int = 0
    terms: tuple[Term, ...] = ()
    notes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def local_sgd(self, *terms: Term, **settings: Any) -> LocalSGD:
        """Local training that minimises the criterion plus these terms; ``settings`` are further fields of LocalSGD."""
        return self.training(LocalSGD, *terms, **settings)

    def training(self, program: type[P], *terms: Term, **settings: Any) -> P:
        """Local training by ``program``, a subclass of LocalSGD; ``settings`` may contain the fields of the subclass.

        Raises ConfigurationError if a batch is a single sample, but the model has batch normalisation or keeps
        statistics of its layers.
        """
        require_variance(self.model, "local.batch_size", self.batch_size)
        if self.batch_size < 2 and any(name.startswith(WATCHED) for name in self.model.buffers):
            raise ConfigurationError(
                "the statistics of a model's layers can't be taken with local.batch_size = 1, because a single sample "
                "has no variance; set a larger local.batch_size, or algorithm.options.batch_statistics = 0"
            )
        fields: dict[str, Any] = {
            "model": self.model,
            "loss": Objective(self.model, self.criterion, terms),
            "epochs": self.epochs,
            "local_steps": self.local_steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "lr_decay": self.lr_decay,
            "rounds_per_task": self.rounds_per_task,
            "augment": self.augment,
            "notes": {**getattr(self.criterion, "notes", {}), **self.notes},
        }
        fields |= settings
        fields["loss"] = loss_with_terms(fields["model"], fields["loss"], self.terms)
        return program(**fields)

    def require_public(self, method: str) -> None:
        """Raise ConfigurationError if the experiment has no public data."""
        if not self.public:
            raise ConfigurationError(
                f"the method {method!r} needs public data at the coordinator, but data.public.fraction = 0; "
                "set data.public = { fraction = 0.025 }"
            )

    def require_fitting_criterion(self) -> None:
        """Raise ConfigurationError if a built-in criterion is for labels but the data are texts, or vice versa."""
        labels = self.criterion in (cross_entropy, reweighted_softmax)
        if self.language and (labels or isinstance(self.criterion, AsymmetricCrossEntropy)):
            raise ConfigurationError(
                "algorithm.loss predicts labels, but the data are texts whose tokens are predicted; "
                "set algorithm.loss = 'token_cross_entropy'"
            )
        if not self.language and self.criterion is token_cross_entropy:
            raise ConfigurationError(
                "algorithm.loss = 'token_cross_entropy' predicts tokens, but the data are no texts; "
                "set algorithm.loss = 'cross_entropy', or set data.text.kind if they are texts"
            )

    def require_classes(self, method: str) -> None:
        """Raise ConfigurationError if the data are texts, which have no classes for the method's loss."""
        if self.language:
            raise ConfigurationError(
                f"the method {method!r} has a loss of classes, but the data are texts whose tokens are predicted; "
                "choose fedavg, fedprox, scaffold, fednova or fedcurv, or other data"
            )

    def require_cross_entropy(self, method: str) -> None:
        """Raise ConfigurationError if the criterion is not the cross-entropy that the method's own loss contains."""
        if self.criterion is not cross_entropy:
            raise ConfigurationError(
                f"the method {method!r} has a loss of its own, into which cross-entropy is built; "
                "set algorithm.loss = 'cross_entropy', or choose another method"
            )

    def require_unheated(self, method: str, **temperatures: float) -> None:
        """Raise ConfigurationError if one of these options is so high that classes of later tasks would be noticed."""
        for option, temperature in temperatures.items():
            if isinstance(self.model, Growing) and temperature > MOST_HEAT:
                raise ConfigurationError(
                    f"the method {method!r} would teach classes of later tasks at algorithm.options.{option} = "
                    f"{temperature:g}; set it to {MOST_HEAT:g} or less, or choose a stream that is not of classes"
                )

    def require_features(self, name: str, what: str = "method") -> None:
        """Raise ConfigurationError if the model returns no features ``[batch, width]`` apart from its logits.

        ``name`` and ``what`` say who needs them.
        """
        if self.model.kind == "sequence":
            raise ConfigurationError(
                f"the {what} {name!r} needs features of whole samples, but this model has them of single tokens; "
                f"choose another {what}"
            )
        outputs = self._outputs()
        if outputs.features is outputs.logits or outputs.features.dim() != 2 or not outputs.features.shape[1]:
            raise ConfigurationError(
                f"the {what} {name!r} needs a model with features, but this one returns logits only; "
                "let it return (logits, features), or choose another model"
            )

    def require_float64(self, method: str) -> None:
        """Raise ConfigurationError if the model can't be computed with variables and samples in float64."""
        variables = {
            name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in self.model.init(0).items()
        }
        try:
            with torch.no_grad():
                self.model.apply(variables, torch.zeros(2, *self.input_shape, dtype=torch.float64), False)
        except Exception as error:
            raise ConfigurationError(
                f"the method {method!r} computes the model in float64 too, and this model can't be; "
                f"let it cast nothing to a fixed dtype, or choose another method: {account(error)}"
            ) from error

    def feature_width(self) -> int:
        """The number of features of a sample, by the model applied to zeros."""
        return int(self._outputs().features.shape[-1])

    def _outputs(self) -> Outputs:
        with torch.no_grad():
            blank = torch.zeros(2, *self.input_shape, dtype=torch.int64 if self.tokens else torch.float32)
            return self.model.apply(self.model.init(0), blank, False)[0]

    def require_no_batch_statistics(self, method: str, why: str) -> None:
        """Raise ConfigurationError if the model has batch normalisation. ``why`` follows "because" in it."""
        if normalises_by_batches(self.model):
            raise ConfigurationError(
                f"the method {method!r} can't work with batch normalisation, because {why}; "
                "choose a model without it, or norm = 'group'"
            )


def normalises_by_batches(model: Model) -> bool:
    """Whether the model has batch normalisation. Only its buffers have names that end with ``running_var``."""
    return any(name.endswith("running_var") for name in model.buffers)


def require_variance(model: Model, key: str, batch_size: int) -> None:
    """Raise ConfigurationError if the model has batch normalisation, but a batch is a single sample.

    ``key`` is the setting of the batch size.
    """
    if batch_size < 2 and normalises_by_batches(model):
        raise ConfigurationError(
            f"batch normalisation can't work with {key} = {batch_size}, because a single sample has no variance; "
            f"set a larger {key}, or choose a model without it"
        )
