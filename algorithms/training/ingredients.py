"""What a method is built from, and the sentences that refuse what it can't be built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fedemu.algorithms.interface import Augment, Model
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Criterion, Objective, Term, cross_entropy, token_cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.protocol.errors import ConfigurationError

P = TypeVar("P", bound=LocalSGD)


@dataclass(frozen=True)
class Ingredients:
    """The model, the criterion, how devices train, and what is known of the fleet and the data.

    With ``rounds_per_task`` above 0 the learning rate begins anew with each task, which has so many rounds. ``devices``
    is the size of the fleet, ``public`` whether there is public data (``Context.public``),
    ``input_shape`` that of one sample, ``labelled`` whether samples have labels, and ``language`` whether they are
    tokens to be predicted instead.
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
    rounds_per_task: int = 0

    def local_sgd(self, *terms: Term, **settings: Any) -> LocalSGD:
        """Local training by the criterion plus these terms; ``settings`` are further fields of LocalSGD."""
        return self.training(LocalSGD, *terms, **settings)

    def training(self, program: type[P], *terms: Term, **settings: Any) -> P:
        """The same as a subclass of LocalSGD, whose own fields are among ``settings``.

        ConfigurationError where the model normalises by batches, but a batch is a single sample.
        """
        if self.batch_size < 2 and self._normalises_by_batches:
            raise ConfigurationError(
                f"batch normalisation can't work with local.batch_size = {self.batch_size}, because a single sample "
                "has no variance; set a larger local.batch_size, or choose a model without it"
            )
        fields = {
            "model": self.model,
            "loss": Objective(self.model, self.criterion, terms),
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "lr_decay": self.lr_decay,
            "rounds_per_task": self.rounds_per_task,
            "augment": self.augment,
        }
        return program(**{**fields, **settings})

    def require_public(self, method: str) -> None:
        """ConfigurationError where the experiment splits off no public data."""
        if not self.public:
            raise ConfigurationError(
                f"the method {method!r} needs public data at the coordinator, but data.public.fraction = 0; "
                "set data.public = { fraction = 0.025 }"
            )

    def require_fitting_criterion(self) -> None:
        """ConfigurationError where a built-in criterion goes by labels but the model predicts tokens, or vice versa."""
        if self.language and self.criterion in (cross_entropy, reweighted_softmax):
            raise ConfigurationError(
                "algorithm.loss predicts labels, but the data are texts whose tokens are predicted; "
                "set algorithm.loss = 'token_cross_entropy'"
            )
        if not self.language and self.criterion is token_cross_entropy:
            raise ConfigurationError(
                "algorithm.loss = 'token_cross_entropy' predicts tokens, but the data are no texts; "
                "set algorithm.loss = 'cross_entropy', or data.text.kind where they are texts"
            )

    def require_classes(self, method: str) -> None:
        """ConfigurationError where there are tokens to predict, and no classes by which the method's loss goes."""
        if self.language:
            raise ConfigurationError(
                f"the method {method!r} has a loss of classes, but the data are texts whose tokens are predicted; "
                "choose fedavg, fedprox, scaffold, fednova or fedcurv, or other data"
            )

    def require_cross_entropy(self, method: str) -> None:
        """ConfigurationError where another criterion was asked for than the one that the method's own loss contains."""
        if self.criterion is not cross_entropy:
            raise ConfigurationError(
                f"the method {method!r} has a loss of its own, into which cross-entropy is built; "
                "set algorithm.loss = 'cross_entropy', or choose another method"
            )

    def require_features(self, method: str) -> None:
        """ConfigurationError where the model gives no features ``[batch, width]`` apart from its logits."""
        if self.model.kind == "sequence":
            raise ConfigurationError(
                f"the method {method!r} needs features of whole samples, but this model has them of single tokens; "
                "choose another method"
            )
        with torch.no_grad():
            outputs, _ = self.model.apply(self.model.init(0), torch.zeros(2, *self.input_shape), False)
        if outputs.features is outputs.logits or outputs.features.dim() != 2 or not outputs.features.shape[1]:
            raise ConfigurationError(
                f"the method {method!r} needs a model with features, but this one returns logits only; "
                "let it return (logits, features), or choose another model"
            )

    def require_no_batch_statistics(self, method: str, why: str) -> None:
        """ConfigurationError where the model normalises by batches; ``why`` completes "can't work, because ..."."""
        if self._normalises_by_batches:
            raise ConfigurationError(
                f"the method {method!r} can't work with batch normalisation, because {why}; "
                "choose a model without it, or norm = 'group'"
            )

    @property
    def _normalises_by_batches(self) -> bool:
        """Running variances are what tells batch normalisation from other buffers, in torch's modules as in ours."""
        return any(name.endswith("running_var") for name in self.model.buffers)
