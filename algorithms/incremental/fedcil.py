"""FedCIL (Qi, Zhao and Li, "Better Generative Replay for Continual Federated Learning", ICLR 2023).

Devices train an AC-GAN on the classes of their task. From the second task on they also train it on as many samples of
earlier classes, which the global generator from the end of the last task makes. Discriminator and generator are sent
both ways and are averaged by examples. After each round the coordinator consolidates the average: it draws samples from
the generators of all devices that took part, and trains the classifier on them by cross-entropy.

The label counts that a device sends decide for which classes its generator is asked. Once there are classes of earlier
tasks, half of the samples are of those. The paper's terms of distillation at the devices are left out, because its
authors' code multiplies them by 0. ``server_iterations`` 100 is that code's. The code takes 400 local iterations a
round; here ``local.epochs`` decides. MFCL's comparison does not name the optimisers: here discriminators take that of
``[local]``, and generators take Adam with a first decay of 0.5, as is usual for such networks.

The authors' code also differs here: its server trains classifier and generator against each other, as its devices do,
on samples whose classes come equally often; those of earlier classes are made by the devices' generators of the end of
the last task. Its devices make and replay only classes that they have had, from generators of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.graphs.repeated import Repeated, uploaded
from fedemu.algorithms.incremental.fedcil_local import (
    FAKE,
    FAKE_CLASSES,
    GENERATOR,
    OLD,
    OLD_CLASSES,
    AcGan,
    AdversarialSGD,
    generator_of,
    row_cross_entropies,
    without_gan,
)
from fedemu.algorithms.incremental.remembering import RememberingFedAvg, RememberingState, classifier_of
from fedemu.algorithms.interface import (
    Context,
    DeviceReply,
    Forest,
    Handle,
    Reducer,
    Reply,
    Script,
    ServerJob,
    Tree,
    collect,
)
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.models.image_generator import ARCHITECTURES, AT_ONCE, Generator, NoiseSize, generator_for
from fedemu.algorithms.models.low_precision import precision_of
from fedemu.algorithms.training.ingredients import Ingredients, require_variance
from fedemu.algorithms.training.job_device import device_for, moved, same_every_time
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.trees import add, flatten, gradients_of, map_leaves, unflatten, variables_of, without
from fedemu.protocol import seeds

STRIDE = 20
"""The number of iterations in one step of a consolidation."""


class FedCIL(RememberingFedAvg):
    """Federated averaging of an AC-GAN. After each round a consolidation of ``iterations`` batches follows.

    ``samples`` is the number of samples that a device's generator makes for it. Qi, Zhao and Li, 2023.
    """

    def __init__(
        self,
        first: AdversarialSGD,
        later: AdversarialSGD,
        gan: AcGan,
        iterations: int,
        batch_size: int,
        samples: int,
        lr: float,
    ) -> None:
        super().__init__(first, later, gan.classifier)
        self._gan, self._optimiser = gan, SGD()
        self._iterations, self._batch_size, self._samples, self._lr = iterations, batch_size, samples, lr

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        yield from ()
        kept = {name: leaf for name, leaf in state.variables.items() if name.startswith(GENERATOR)}
        return {"generator": {**kept, SEEN: state.variables[SEEN]}}

    @property
    def reduce(self) -> Mapping[str, Reducer]:
        return {**super().reduce, **({"locals": collect.of("delta")} if self._iterations else {})}

    def merged(self, state: RememberingState, reply: Reply, context: Context) -> Script[Tree]:
        average = self.classifier.moved(state.variables, reply.values["delta"])
        if not self._iterations:
            return average
        carry: Tree = yield self.job(state, average, reply.values["locals"], reply.devices, context)
        return {**average, **unflatten(carry)["model"]}

    def pictures(self, state: RememberingState, samples: int, seed: int) -> Tree:
        """Pictures of the classes of earlier tasks, ``samples`` of each, by the generator that devices replay from."""
        if not state.kept:
            return {}
        generator = state.kept["generator"]
        y = (generator[SEEN] > 0).nonzero()[:, 0].repeat(samples)
        draws = seeds.generator(seed, purpose="pictures")
        z = torch.from_numpy(draws.standard_normal((len(y), self._gan.latent), "float32"))
        parts = zip(torch.split(z, AT_ONCE), torch.split(y, AT_ONCE), strict=True)
        with torch.no_grad():
            made = [self._gan.images(generator_of(generator), some, of, False)[0] for some, of in parts]
        return {"x": torch.cat(made), "y": y}

    def job(
        self,
        state: RememberingState,
        average: Tree,
        locals: Sequence[Handle],
        replies: Sequence[DeviceReply],
        context: Context,
    ) -> ServerJob:
        """The consolidation: it trains the classifier of ``average`` on samples of the devices' generators.

        The samples are made when the job begins.
        """

        def init() -> Tree:
            old = state.kept["generator"][SEEN].double().numpy() if state.task else None
            parts = [
                self._made(add(state.variables, handle.load()), shares, context, handle)
                for handle, reply in zip(locals, replies, strict=True)
                if (shares := class_shares(reply.label_counts or (), old)) is not None
            ]
            data = {name: torch.cat([part[name] for part in parts]) for name in ("x", "y")} if parts else {}
            return flatten({"model": without_gan(average), "data": data})

        iterations = Repeated(self._iteration)

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            device = device_for(self.classifier, without_gan(average))
            forest = unflatten(moved(carry, device))
            if "data" not in forest:
                return carry, True
            numbers = range(index * STRIDE, min((index + 1) * STRIDE, self._iterations))
            rows = uploaded([self._rows(number, len(forest["data"]["y"]), context) for number in numbers], device)
            batches = (map_leaves(lambda leaf, some=some: leaf[some], forest["data"]) for some in rows)
            with same_every_time(device):
                fixed = {"lr": torch.tensor(self._lr, device=device)}
                model = iterations.over(forest["model"], fixed, batches, device)
            return flatten({"model": model, "data": forest["data"]}), False

        return ServerJob("consolidation", init, step, math.ceil(self._iterations / STRIDE), checkpoint_every=1)

    def _rows(self, iteration: int, samples: int, context: Context) -> Tensor:
        draws = seeds.generator(context.seed, round=context.round, purpose=f"consolidation/{iteration}")
        return torch.from_numpy(draws.integers(0, samples, self._batch_size))

    def _iteration(self, variables: Tree, fixed: Tree, given: Tree) -> Tree:
        """The classifier's variables after an iteration on a batch of samples ``x`` of the classes ``y``."""
        before = without(variables, self.classifier.buffers)
        trained = variables_of(before)
        outputs, changed = self.classifier.apply({**variables, **trained}, given["x"], True)
        slopes = gradients_of(row_cross_entropies(outputs.logits, given["y"]).mean(), trained)
        after, _ = self._optimiser.step(before, slopes, {}, fixed["lr"])
        return {**variables, **map_leaves(Tensor.detach, changed), **after}

    def _made(self, variables: Tree, shares: NDArray[np.float64], context: Context, handle: Handle) -> Tree:
        """Images ``x [samples, ...]`` of one device's generator, with classes ``y`` drawn by ``shares [classes]``."""
        draws = seeds.generator(context.seed, round=context.round, device=handle.device, purpose="consolidation")
        y = torch.from_numpy(draws.choice(len(shares), self._samples, p=shares))
        z = torch.from_numpy(draws.standard_normal((self._samples, self._gan.latent), "float32"))
        device = device_for(self.classifier, without_gan(variables))
        generator = moved(generator_of(variables), device)
        with torch.no_grad(), same_every_time(device):
            x, _ = self._gan.images(generator, z.to(device), y.to(device), False)
        return {"x": x.cpu(), "y": y}


def class_shares(counts: Sequence[int], old: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    """The share of each class among the samples that a device's generator was trained on; None if there were none.

    ``counts [classes]`` are the device's label counts. ``old [classes]`` is 1 for classes of earlier tasks and 0 for
    others, or None in the first task.
    """
    held = np.asarray(counts, dtype=np.float64)
    if not held.sum():
        return None
    shares: NDArray[np.float64] = held / held.sum()
    return shares if old is None else (shares + old / old.sum()) / 2


def fedcil(
    ingredients: Ingredients,
    noise: NoiseSize = 0,
    generator_lr: PositiveFloat = 0.001,
    server_iterations: NonNegativeInt = 100,
    server_batch: PositiveInt = 32,
    server_samples: PositiveInt = 64,
    server_lr: PositiveFloat = 0.01,
) -> FedCIL:
    """FedCIL (Qi, Zhao and Li, 2023).

    ``noise`` is the number of noise values that a generator takes beside the class; 0 takes as many as MFCL's generator
    of this image size. Each device's generator makes ``server_samples`` samples in a round. With
    ``server_iterations = 0`` the average is left as it is. Raises ConfigurationError if the stream has no tasks, if
    there is no generator for images of this size, or if a batch of the server is a single sample although the model has
    batch normalisation.
    """
    classifier = classifier_of(ingredients, "fedcil")
    ingredients.require_cross_entropy("fedcil")
    if server_iterations:
        require_variance(classifier, "algorithm.options.server_batch", server_batch)
    size = generator_for(ingredients.input_shape)
    latent = noise or ARCHITECTURES[size.size].noise
    precision = precision_of(classifier)
    generator = Generator(size.size, size.channels, latent + ingredients.classes, precision=precision)
    gan = AcGan(classifier, generator, latent)
    ingredients = replace(ingredients, model=gan)
    rows = ingredients.batch_size
    made: dict[str, tuple[int, ...]] = {FAKE: (rows, latent), FAKE_CLASSES: (rows, ingredients.classes)}
    replayed: dict[str, tuple[int, ...]] = {OLD: (rows, latent), OLD_CLASSES: (rows, ingredients.classes)}
    settings: dict[str, Any] = {"gan": gan, "generator_lr": generator_lr, "declares_label_counts": True}
    first = ingredients.training(AdversarialSGD, **settings, replay=False, noise=made)
    later = ingredients.training(AdversarialSGD, **settings, replay=True, noise={**made, **replayed})
    return FedCIL(first, later, gan, server_iterations, server_batch, server_samples, server_lr)
