"""Random models in stacks: a device's result has the same bits in every slot, whatever the other slots hold."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import Context, Model
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.registry import build_algorithm, find_criterion
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.trees import model_digest
from fedemu.device.compute.executors.executor import Job, JobResult, Source
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.trainer import open_device
from fedemu.protocol.ids import Digest

SAMPLES, DEVICES = 200, 9
SEEDS = (1, 6, 7, *range(9, 15), *range(16, 20), 22, 23)
"""All but two give a model whose bits depend on the slot, on one processor at least, if ``alike.py`` does nothing."""
METHODS = ("fedavg", "fedprox", "fedntd", "moon", "scaffold", "flashback", "fedcurv")
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Softplus, nn.Mish, nn.LogSigmoid, nn.PReLU)


class Normed(nn.Module):
    """Features less their mean, divided by a root of the sum of their squares."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (1 + x.square().sum(-1, keepdim=True)).sqrt()


def layers(random: Random, shape: tuple[int, int, int], classes: int, norms: bool) -> list[nn.Module]:
    made: list[nn.Module] = []
    channels, height, _ = shape
    if random.random() < 0.3:
        wider = random.choice([2, 3, 5])
        made += [nn.Conv2d(channels, wider, 3, padding=1), random.choice(ACTIVATIONS)(), nn.MaxPool2d(2)]
        channels, height = wider, height // 2
    made.append(nn.Flatten())
    width = channels * height**2
    for _ in range(random.randint(0, 2)):
        wider = random.choice([3, 5, 7, 13, 16, 25])
        made.append(nn.Linear(width, wider))
        if norms and random.random() < 0.5:
            made.append(random.choice([nn.BatchNorm1d, nn.LayerNorm])(wider))
        made.append(random.choice([*ACTIVATIONS, Normed])())
        width = wider
    return [*made, nn.Linear(width, classes)]


def noise(shape: tuple[int, int, int], classes: int) -> Corpus:
    random = np.random.default_rng(0)
    split = Split(random.integers(0, 256, (SAMPLES, *shape), np.uint8), random.integers(0, classes, SAMPLES), {})
    names, moments = tuple(map(str, range(classes))), np.full(shape[0], 127.5)
    return Corpus("noise", split, split, names, shape, moments, moments / 2, Digest("0" * 64))


def bits(result: object) -> list[str]:
    assert isinstance(result, JobResult), result
    trees = [*(tree for _, tree in sorted(result.payload.items())), result.own]
    return [*map(model_digest, filter(None, trees)), repr(sorted(result.metrics.items()))]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_device_has_the_same_bits_in_every_slot(seed: int, where: str) -> None:
    place = open_device(where)
    random = Random(seed)
    height = random.choice([4, 5, 6])
    shape, classes = (random.choice([1, 3]), height, height), random.choice([2, 3, 5, 7, 10])
    name, batch, stack = random.choice(METHODS), random.choice([2, 3, 5, 7, 10]), random.choice([2, 3, 5, 16])
    torch.manual_seed(seed)
    modules = layers(random, shape, classes, norms=name != "fedcurv")
    model: Model = from_module(lambda: nn.Sequential(*modules))
    rest = {"devices": DEVICES, "input_shape": shape}
    criterion = find_criterion("cross_entropy", model)
    ingredients = Ingredients(model, criterion, classes, 1, batch, 0.05, 0.9, **rest)  # type: ignore[arg-type]
    options: dict[str, Any] = {"flashback": {"distil": "devices"}, "fedcurv": {"samples": 6}}.get(name, {})
    algorithm = build_algorithm(name, options, ingredients)
    context = Context(1, 0, 5, classes, None)
    ask: Any = next(algorithm.round(algorithm.init(model.init(1), context), context))
    program: Any = algorithm.programs[ask.program]
    shared = {key: {name: leaf.to(place) for name, leaf in tree.items()} for key, tree in ask.shared.items()}
    source = Source(noise(shape, classes), 1, place)
    jobs = [Job(i, 1, 0, np.arange(17 * i, 17 * i + 3 + 2 * i)) for i in range(DEVICES)]
    executor = Vmapped(stack)

    def played(chosen: Sequence[int]) -> list[list[str]]:
        return [*map(bits, executor.run(program, shared, [jobs[i] for i in chosen], source))]

    expected = played(range(DEVICES))
    for _ in range(3):
        chosen = random.sample(range(DEVICES), random.randint(1, DEVICES))
        assert played(chosen) == [expected[i] for i in chosen]
