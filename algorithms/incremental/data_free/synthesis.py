"""Samples of earlier classes, made at the coordinator without data: a server job in rounds of synthesis.

In each round a generator is trained for a few steps against the frozen global model, the *teacher*, and its best batch
is kept. After some rounds a *student*, a new model of the same kind, learns the teacher's answers to all samples that
were kept, and the generator looks for samples on which both still differ. The generator minimises

    cross_entropy · CE + batch_statistics · L_BN - divergence · L_KL + the losses of its own.

CE is the teacher's cross-entropy for the classes that the samples are to show, L_BN is ``statistics_distance`` and L_KL
is ``agreement_divergence``. How images come from trained variables is the business of a ``Maker``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.graphs.repeated import Repeated
from fedemu.algorithms.incremental.data_free.losses import agreement_divergence, statistics_distance
from fedemu.algorithms.incremental.data_free.maker import OPTIMISER, Maker, SynthesisSettings
from fedemu.algorithms.interface import Context, Forest, Model, Outputs, ServerJob, Tree
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.models.layer_statistics import running_statistics, unwatched
from fedemu.algorithms.training.class_losses import distillation_among
from fedemu.algorithms.training.job_device import job_device, moved, same_every_time
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.trees import (
    add,
    flatten,
    gradients_of,
    map_leaves,
    unflatten,
    variables_of,
    without,
    zeros_like,
)
from fedemu.protocol import seeds
from fedemu.protocol.errors import FedemuError

CHECKPOINT_EVERY: Final = 5
"""The number of rounds of synthesis between two checkpoints of the job."""
KEPT: Final = "kept."
"""The beginning of the keys, in the job's carry, of what a maker keeps from round to round."""
_TRAINED: Final = "trained."
_MEMORY: Final = "memory."
_SLOPES: Final = "slopes."
"""The beginnings of the keys of what an iteration trains, of its optimiser's memory, and of the sums of gradients."""
STUDENT_MOMENTUM: Final = 0.9


class _Tried(NamedTuple):
    """What the iterations of a round leave: variables, sums of their gradients, the best batch, newest statistics.

    ``best`` is the batch ``x`` with the lowest loss of all iterations, and ``losses`` are those of this batch.
    """

    variables: Forest
    slopes: Forest
    best: Tensor
    losses: Tree
    statistics: Tree


@dataclass(frozen=True, eq=False)
class Synthesis:
    """Makes samples of the classes that a teacher has seen.

    ``model`` is the teacher's and the student's network. If ``settings.batch_statistics`` is not 0, it must report
    statistics of its layers.
    """

    maker: Maker
    model: Model
    settings: SynthesisSettings

    def job(self, teacher: Tree, shape: tuple[int, ...], context: Context) -> ServerJob:
        """The server job ``synthesis``, with a round of synthesis per step, for samples of this ``shape``.

        Its carry holds the samples under ``pool/``: ``x``, the classes ``y`` that they are to show, and the teacher's
        ``logits`` and ``features``. Under ``judged/`` it holds scalars about the last round: each loss, ``recognised``,
        the share of samples that the teacher puts into the class that they are to show, and ``agreed``, the share to
        which the student, before it learns from them, gives the teacher's answer.
        """

        def init() -> Tree:
            student = {**self.model.init(seeds.integer(context.seed, round=context.round, purpose="student"))}
            student[SEEN] = teacher[SEEN]
            kept = self.maker.begin(seeds.integer(context.seed, purpose="generator"))
            one = self._answered(teacher, torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64))
            nothing = map_leaves(lambda leaf: leaf[:0], one)
            momentum = zeros_like(without(student, self.model.buffers))
            forest = {"student": student, "momentum": momentum, "pool": nothing}
            return flatten({**forest, **_marked(KEPT, kept)})

        tries, lessons = Repeated(self._try), Repeated(self._lesson)

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            device = job_device()
            forest = unflatten(moved(carry, device))
            with same_every_time(device):
                return flatten(self._round(tries, lessons, forest, moved(teacher, device), index, context)), False

        return ServerJob("synthesis", init, step, self.settings.rounds, CHECKPOINT_EVERY)

    def _round(
        self, tries: Repeated, lessons: Repeated, forest: Forest, teacher: Tree, index: int, context: Context
    ) -> Forest:
        """The job's carry after one more round of synthesis."""
        settings = self.settings
        draws = seeds.generator(context.seed, round=context.round, purpose=f"synthesis/{index}")
        y = even_classes(teacher[SEEN] > 0, settings.batch_size, draws)
        kept = _unmarked(KEPT, forest)
        opened = self.maker.opened(kept, settings.batch_size, draws)
        statistics = forest.get("statistics", {})
        student = forest["student"] if index > settings.warm_up else None
        tried = self._tried(tries, kept, opened, y, teacher, student, statistics)
        if not bool(tried.best.isfinite().all()):
            raise FedemuError(
                f"the samples of the synthesis are not finite any more in round {index} of it; begin a new run with "
                "lower learning rates of what makes them, such as algorithm.options.generator_lr"
            )
        pool = forest["pool"]
        fresh = self._answered(teacher, tried.best, y)
        answers, _ = self.model.apply(unwatched(forest["student"]), tried.best, False)
        judged = {
            **tried.losses,
            "recognised": (fresh["logits"].argmax(-1) == y).float().mean(),
            "agreed": (fresh["logits"].argmax(-1) == answers.logits.argmax(-1)).float().mean(),
        }
        if settings.keep_all or index >= settings.warm_up:
            pool = map_leaves(lambda left, right: torch.cat([left, right]), pool, fresh)
        after: dict[str, Tree] = {
            "student": forest["student"],
            "momentum": forest["momentum"],
            "pool": pool,
            "judged": map_leaves(Tensor.detach, judged),
            "statistics": _blended(statistics, tried.statistics, settings.statistics_momentum),
        }
        if index >= settings.warm_up:
            after["student"], after["momentum"] = self._taught(lessons, after, teacher[SEEN] > 0, index, context)
        closed = self.maker.closed(kept, tried.variables, tried.slopes)
        return {**after, **_marked(KEPT, closed)}

    def _tried(
        self,
        tries: Repeated,
        kept: Forest,
        opened: Forest,
        y: Tensor,
        teacher: Tree,
        student: Tree | None,
        statistics: Tree,
    ) -> _Tried:
        """The iterations of a round, which train the variables ``opened`` to show the classes ``y``."""
        trained = {key: moved(tree, y.device) for key, tree in opened.items()}
        carry = {
            **_marked(_TRAINED, trained),
            **_marked(_MEMORY, {key: OPTIMISER.begin(tree) for key, tree in trained.items()}),
            **_marked(_SLOPES, {key: zeros_like(tree) for key, tree in trained.items()}),
        }
        rates = {key: torch.tensor(rate, device=y.device) for key, rate in self.maker.rates.items()}
        others = {"teacher": teacher, "student": student or {}, "statistics": statistics, "rates": rates}
        fixed = flatten({**_marked(KEPT, kept), **others, "labels": {"y": y}})
        # The first iteration finds the first batch, from which on there is a best one.
        begun = self._try(flatten(carry), fixed, {})
        after = unflatten(tries.over(begun, fixed, [{}] * (self.settings.steps - 1), y.device))
        made = after["made"]
        return _Tried(
            _unmarked(_TRAINED, after), _unmarked(_SLOPES, after), made["x"], after["losses"], after.get("newest", {})
        )

    def _try(self, carry: Tree, fixed: Tree, given: Tree) -> Tree:
        """An iteration: a batch is made, and what has made it is trained. ``made`` is the best batch so far."""
        forest, known = unflatten(carry), unflatten(fixed)
        y, rates = known["labels"]["y"], known["rates"]
        trained = _unmarked(_TRAINED, forest)
        memories, slopes = _unmarked(_MEMORY, forest), _unmarked(_SLOPES, forest)
        leaves = variables_of(flatten(trained))
        x = self.maker.images(_unmarked(KEPT, known), unflatten(leaves), y)
        outputs, _ = self.model.apply(unwatched(known["teacher"]), x, False)
        losses = self._losses(outputs, x, y, known["teacher"], known.get("student"), known.get("statistics", {}))
        value = torch.stack(list(losses.values())).sum()
        made: Tree = {"value": value.detach(), "x": x.detach()}
        told: Tree = map_leaves(Tensor.detach, losses)
        if "made" in forest:
            better = value.detach() < forest["made"]["value"]
            made, told = _chosen(better, made, forest["made"]), _chosen(better, told, forest["losses"])
        for key, tree in unflatten(gradients_of(value, leaves)).items():
            trained[key], memories[key] = OPTIMISER.step(trained[key], tree, memories[key], rates[key])
            slopes[key] = add(slopes[key], tree)
        return flatten(
            {
                **_marked(_TRAINED, trained),
                **_marked(_MEMORY, memories),
                **_marked(_SLOPES, slopes),
                "made": made,
                "losses": told,
                "newest": map_leaves(Tensor.detach, outputs.statistics),
            }
        )

    def _losses(
        self, outputs: Outputs, x: Tensor, y: Tensor, teacher: Tree, student: Tree | None, statistics: Tree
    ) -> dict[str, Tensor]:
        """The weighted losses by name. A loss whose weight is 0 is left out, and so is that of an absent student."""
        settings = self.settings
        values = {"cross_entropy": settings.cross_entropy * functional.cross_entropy(outputs.logits, y)}
        if settings.batch_statistics:
            blended = _blended(statistics, outputs.statistics, settings.statistics_momentum)
            distance = statistics_distance(running_statistics(teacher), blended)
            values["batch_statistics"] = settings.batch_statistics * distance
        if settings.divergence and student is not None:
            answers, _ = self.model.apply(unwatched(student), x, False)
            apart = agreement_divergence(answers.logits, outputs.logits, teacher[SEEN] > 0)
            values["divergence"] = -settings.divergence * apart
        return {**values, **self.maker.losses(outputs, y)}

    def _answered(self, teacher: Tree, x: Tensor, y: Tensor) -> Tree:
        """Samples with the teacher's answers to them."""
        with torch.no_grad():
            outputs, _ = self.model.apply(unwatched(teacher), x, False)
        return {"x": x, "y": y, "logits": outputs.logits, "features": outputs.features}

    def _taught(
        self, lessons: Repeated, carry: Forest, seen: Tensor, index: int, context: Context
    ) -> tuple[Tree, Tree]:
        """The student and its momentum after ``student_steps`` batches of the pool."""
        settings, pool = self.settings, carry["pool"]
        draws = seeds.generator(context.seed, round=context.round, purpose=f"student/{index}")
        rows = draws.integers(0, len(pool["y"]), (settings.student_steps, settings.student_batch))
        rate = torch.tensor(settings.student_lr, device=seen.device)
        batches = (
            {name: pool[name][chosen] for name in ("x", "logits", "features")}
            for chosen in torch.from_numpy(rows).to(seen.device)
        )
        begun = flatten({"student": carry["student"], "momentum": carry["momentum"]})
        after = unflatten(lessons.over(begun, {"seen": seen, "lr": rate}, batches, seen.device))
        student, momentum = after["student"], after["momentum"]
        if not all(bool(leaf.isfinite().all()) for leaf in student.values()):
            raise FedemuError(
                f"the student of the synthesis is not finite any more after round {index} of it; "
                f"begin a new run with algorithm.options.student_lr below {settings.student_lr:g}"
            )
        return student, momentum

    def _lesson(self, carry: Tree, fixed: Tree, given: Tree) -> Tree:
        """An iteration: the ``student`` and its ``momentum`` after a batch ``x`` with the teacher's answers."""
        settings, forest, buffers = self.settings, unflatten(carry), self.model.buffers
        student = forest["student"]
        before = without(student, buffers)
        leaves = variables_of(before)
        outputs, changed = self.model.apply({**student, **leaves}, given["x"], True)
        value = distillation_among(outputs.logits, given["logits"], fixed["seen"], settings.temperature)
        value = value * settings.temperature**2
        if (more := self.maker.lesson(outputs, given["features"])) is not None:
            value = value + more
        optimiser = SGD(STUDENT_MOMENTUM, settings.student_decay)
        trained, momentum = optimiser.step(before, gradients_of(value, leaves), forest["momentum"], fixed["lr"])
        return flatten({"student": {**student, **map_leaves(Tensor.detach, changed), **trained}, "momentum": momentum})


def _chosen(first: Tensor, one: Tree, other: Tree) -> Tree:
    """The first of the two trees where ``first`` (bool, without dimensions) is true, and the other one where not."""
    return map_leaves(lambda new, old: torch.where(first, new, old), one, other)


def _marked(mark: str, forest: Forest) -> Forest:
    """The forest with ``mark`` before each key."""
    return {mark + key: tree for key, tree in forest.items()}


def _unmarked(mark: str, forest: Forest) -> dict[str, Tree]:
    """The trees whose keys begin with ``mark``, without it."""
    return {key.removeprefix(mark): tree for key, tree in forest.items() if key.startswith(mark)}


def even_classes(seen: Tensor, rows: int, draws: np.random.Generator) -> Tensor:
    """``rows`` classes, int64: each class of ``seen [classes]`` (bool) equally often, and the rest at random."""
    classes = seen.nonzero()[:, 0]
    rest = torch.from_numpy(draws.integers(0, len(classes), rows % len(classes))).to(seen.device)
    return torch.cat([classes.repeat(rows // len(classes)), classes[rest]])


def _blended(earlier: Tree, newest: Tree, momentum: float) -> dict[str, Tensor]:
    """``momentum`` parts of the statistics of earlier rounds, the rest of the newest; only these if there are none."""
    if not earlier:
        return {**newest}
    return map_leaves(lambda old, new: momentum * old + (1 - momentum) * new, earlier, newest)
