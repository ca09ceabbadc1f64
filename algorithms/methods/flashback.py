"""Flashback (2024), "Understanding and Mitigating Forgetting in Federated Learning": distillation by what models know.

A round is Algorithm 1. Devices train by equation 3 with the global model as the only teacher. The student's counts are
the device's label counts; the teacher's counts are π, the knowledge of the global model. The coordinator averages the
local models, and trains the average on the public data by the same loss. Its teachers are the local models and the
global model before the round. Then the coordinator adds ``gamma`` times the devices' label counts to π. In round 1 π is
0, and devices train by cross-entropy.

The paper leaves some choices open, and there is no public code. Here

- label counts are raw numbers. If π were divided by its sum, ``gamma`` would cancel; figure 13 shows that it matters;
- participations are counted before ``gamma · r <= 1`` is tested, so a device adds ``floor(1 / gamma)`` times;
- on a stream, participations are counted anew in each period, and π goes on. The limit makes a device's samples count
  once in the end. Samples of a new period have not counted yet, whoever brings them;
- at the server the student's counts are π before this round's update, so π is in the denominator twice;
- there is no factor of the squared temperature. Teachers are in evaluation mode; at the server their logits are
  computed once;
- the server trains by SGD with momentum, in passes over the public training part, until ``patience`` passes bring no
  better accuracy on the public validation part. The average itself is a candidate for the best model.

Defaults: ``gamma`` 0.025 (for CIFAR-10; CINIC-10 and FEMNIST take 0.1) and ``temperature`` 3 are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Batch,
    Context,
    DeviceReply,
    Facts,
    Forest,
    Handle,
    Labelled,
    LocalProgram,
    Model,
    Query,
    Reply,
    Script,
    Tree,
    collect,
    weighted_mean,
)
from fedemu.algorithms.methods.fedntd import preservation
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.losses import dynamic_distillation, knowledge_weights
from fedemu.algorithms.training.objective import Loss, cross_entropy
from fedemu.algorithms.training.server_training import ServerTraining, predict
from fedemu.algorithms.trees import add
from fedemu.protocol.errors import ConfigurationError

Knowledge = Literal["counts", "probabilities"]


def accumulate_knowledge(knowledge: Tensor, counts: Tensor, participations: Tensor, gamma: float) -> Tensor:
    """The global model's knowledge after a round, ``[classes]``.

    ``counts [devices, classes]`` and ``participations [devices]`` are those of the round's devices; participations
    include this round. Each device adds ``gamma · counts`` in its first ``floor(1 / gamma)`` participations, and
    nothing afterwards. Algorithm 1, lines 14 to 19.
    """
    most = math.floor(1 / gamma + 1e-9)  # 1 / gamma may be slightly below a whole number.
    learnt = gamma * counts[participations <= most].double().sum(0)
    return (knowledge + learnt).to(knowledge.dtype)


@dataclass(frozen=True)
class DynamicLoss:
    """The devices' loss: equation 3 with ``shared["model"]`` as teacher and ``shared["knowledge"]`` as its counts.

    The metric ``loss`` is the cross-entropy, which other methods report too.
    """

    model: Model
    temperature: float
    knowledge: Knowledge

    def __call__(self, variables: Tree, batch: Batch, shared: Forest, own: Tree, facts: Facts) -> Loss:
        outputs, buffers = self.model.apply(variables, batch.x, True)
        teacher, _ = self.model.apply(shared["model"], batch.x, False)
        known = facts.label_counts
        if self.knowledge == "probabilities":
            known = known / facts.examples.clamp(min=1)
        student, teachers = knowledge_weights(known, shared["knowledge"]["counts"][None])
        value = dynamic_distillation(
            outputs.logits, batch.y, teacher.logits[None], student, teachers, self.temperature, batch.weight
        )
        surprise = cross_entropy(outputs.logits, batch, facts)
        return Loss(value, buffers, {"loss": surprise.detach()}, outputs)


@dataclass(frozen=True)
class FlashbackState:
    """``knowledge [classes]`` is π; ``participations [devices]`` counts each device's accepted results in ``task``.

    ``task`` is the period of the last round.
    """

    variables: Tree
    knowledge: Tensor
    participations: Tensor
    task: int = 0


class Flashback:
    """One ask a round, then a server job. Without ``server`` the average stays as it is.

    ``guided`` says whether the devices' loss reads π. ``devices`` is the size of the fleet.
    """

    def __init__(
        self, local: LocalSGD, server: ServerTraining | None, gamma: float, guided: bool, devices: int
    ) -> None:
        self.programs: Mapping[str, LocalProgram | Query] = {"train": local}
        self._model = local.model
        self._server = server
        self._gamma = gamma
        self._guided = guided
        self._devices = devices

    def init(self, variables: Tree, context: Context) -> FlashbackState:
        nobody = torch.zeros(self._devices, dtype=torch.int64)
        return FlashbackState(variables, torch.zeros(context.classes), nobody, context.task)

    def round(self, state: FlashbackState, context: Context) -> Script[FlashbackState]:
        reply: Reply = yield self._ask(state)
        counts = _label_counts(reply.devices)
        variables: Tree = add(state.variables, reply.values["delta"])
        if self._server is not None:
            trained = torch.tensor([told.examples > 0 for told in reply.devices])
            prepare = partial(self._lessons, state, reply.values["locals"], counts, trained)
            distilled = yield from self._server.train("distillation", variables, prepare, context)
            variables, counts = distilled.variables, distilled.lessons["counts"]
        assert counts is not None, "without label counts the server estimates them"
        present = torch.tensor([reply.device for reply in reply.devices])
        before = state.participations if context.task == state.task else torch.zeros_like(state.participations)
        participations = before.index_add(0, present, torch.ones_like(present))
        knowledge = accumulate_knowledge(state.knowledge, counts, participations[present], self._gamma)
        return FlashbackState(variables, knowledge, participations, context.task)

    def variables(self, state: FlashbackState) -> Tree:
        return state.variables

    def _ask(self, state: FlashbackState) -> Ask:
        shared: dict[str, Tree] = {"model": state.variables}
        if self._guided:
            shared["knowledge"] = {"counts": state.knowledge}
        reduce = {"delta": weighted_mean}
        if self._server is not None:
            reduce["locals"] = collect.of("delta")
        return Ask("train", shared, reduce)

    def _lessons(
        self, state: FlashbackState, locals: Sequence[Handle], counts: Tensor | None, trained: Tensor, public: Labelled
    ) -> Tree:
        """The lessons of ``taught``. If ``counts [K, classes]`` of the local models are None, they are estimated.

        ``trained [K]`` says which devices had samples. The others know nothing, and so they do not teach.
        """
        teachers = [predict(self._model, add(state.variables, each.load()), public.x) for each in locals]
        if counts is None:
            counts = torch.stack([_mean_answer(logits) for logits in teachers]) * trained[:, None]
        logits = torch.stack([*teachers, predict(self._model, state.variables, public.x)])
        known = torch.cat([counts, state.knowledge[None]])
        student, weights = knowledge_weights(state.knowledge, known)
        return {"counts": counts, "logits": logits, "student": student, "teachers": weights}


def taught(temperature: float, logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
    """The server's loss: equation 3 with all teachers of ``lessons``."""
    return dynamic_distillation(
        logits, y, lessons["logits"][:, rows], lessons["student"], lessons["teachers"], temperature
    )


def flashback(
    ingredients: Ingredients,
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.025,
    temperature: PositiveFloat = 3.0,
    distil: Literal["both", "devices", "server"] = "both",
    local: Literal["dynamic", "not_true"] = "dynamic",
    beta: NonNegativeFloat = 1.0,
    tau: PositiveFloat = 1.0,
    knowledge: Knowledge = "counts",
    server_lr: PositiveFloat = 0.01,
    server_momentum: NonNegativeFloat = 0.9,
    server_batch: PositiveInt = 64,
    server_epochs: NonNegativeInt = 50,
    patience: PositiveInt = 5,
) -> Flashback:
    """Flashback and its variants.

    ``distil`` may name one side only (appendix E): ``devices`` leaves the average as it is and needs no public data,
    and ``server`` lets devices train by cross-entropy. ``local = "not_true"`` replaces dynamic distillation at the
    devices by FedNTD's loss with ``beta`` and ``tau``.

    With ``knowledge = "probabilities"`` (appendix B) label counts never leave a device. The coordinator replaces them
    by a local model's mean output probabilities over the public training part. A device compares π with its label
    proportions, which add up to 1 like the probabilities. ``gamma`` then has to be tuned anew.

    Raises ConfigurationError if options contradict each other, or if public data or classes are needed and missing.
    """
    ingredients.require_classes("flashback")
    ingredients.require_unheated("flashback", temperature=temperature)
    ingredients.require_cross_entropy("flashback")
    _require_sense(distil, local)
    model, guided = ingredients.model, distil != "server" and local == "dynamic"
    own_loss = {"loss": DynamicLoss(model, temperature, knowledge)} if guided else {}
    terms = (preservation(beta, tau),) if local == "not_true" else ()
    program = ingredients.local_sgd(*terms, **own_loss, declares_label_counts=knowledge == "counts")
    server = None
    if distil != "devices" or knowledge == "probabilities":
        ingredients.require_public("flashback")
        # A job without steps still makes its lessons, which contain the estimated knowledge of the local models.
        epochs = 0 if distil == "devices" else server_epochs
        loss = partial(taught, temperature)
        server = ServerTraining.by_passes(model, loss, server_lr, server_momentum, server_batch, epochs, patience)
    return Flashback(program, server, gamma, guided, ingredients.devices)


def _require_sense(distil: str, local: str) -> None:
    """Raise ConfigurationError if two options contradict each other."""
    if local == "not_true" and distil == "server":
        raise ConfigurationError(
            "algorithm.options.local = 'not_true' distils at the devices, but distil = 'server' does not; "
            "remove one of the two"
        )
    if local == "not_true" and distil == "devices":
        raise ConfigurationError(
            "algorithm.options.local = 'not_true' with distil = 'devices' is FedNTD; set algorithm.name = 'fedntd', "
            "or distil = 'both'"
        )


def _mean_answer(logits: Tensor) -> Tensor:
    """The mean probabilities ``[classes]`` over samples; 0 without samples."""
    return logits.softmax(-1).mean(0) if len(logits) else logits.new_zeros(logits.shape[-1])


def _label_counts(replies: Sequence[DeviceReply]) -> Tensor | None:
    """The label counts ``[K, classes]`` in cohort order. None if devices do not send them."""
    counts = [reply.label_counts for reply in replies if reply.label_counts is not None]
    return torch.tensor(counts, dtype=torch.float32) if counts else None
