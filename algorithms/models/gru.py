"""A small recurrent network that predicts the next token, for characters on a CPU.

It is a gated recurrent unit (Cho et al., 2014) in the form of ``torch.nn.GRU``, but written out, so that it runs under
``torch.func.vmap`` and in forward mode. With plain SGD it learns characters much faster than a small Transformer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Generator, Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.bert import token_length
from fedemu.algorithms.models.layers import Linear, uniform


@dataclass(frozen=True)
class Gated:
    """One layer: ``x [batch, length, inputs]`` to its states ``[batch, length, width]``. The first state is zero."""

    name: str
    inputs: int
    width: int

    def init(self, generator: Generator) -> dict[str, Tensor]:
        shapes = {"input": (3 * self.width, self.inputs), "state": (3 * self.width, self.width)}
        variables = {}
        for name, shape in shapes.items():
            variables[f"{self.name}.{name}.weight"] = uniform(shape, self.width, generator)
            variables[f"{self.name}.{name}.bias"] = uniform(shape[:1], self.width, generator)
        return variables

    def __call__(self, variables: Tree, x: Tensor) -> Tensor:
        weight, bias = variables[f"{self.name}.state.weight"].t(), variables[f"{self.name}.state.bias"]
        # The contribution of the inputs to both gates and to the candidate, for all places at once.
        brought = x @ variables[f"{self.name}.input.weight"].t() + variables[f"{self.name}.input.bias"]
        state = torch.zeros_like(brought[:, 0, : self.width])
        states = []
        for place in brought.unbind(1):
            kept = state @ weight + bias
            reset, update = (place + kept)[:, : 2 * self.width].sigmoid().chunk(2, -1)
            candidate = (place[:, 2 * self.width :] + reset * kept[:, 2 * self.width :]).tanh()
            state = candidate + update * (state - candidate)
            states.append(state)
        return torch.stack(states, 1)


@dataclass(frozen=True)
class Recurrent:
    """Embeddings, gated layers, and a linear layer. Logits are ``[batch, length, vocabulary]``.

    ``x [batch, 2, length]`` is as in ``Corpus``; the model reads its first row.
    """

    vocabulary: int
    embedding: int
    layers: tuple[Gated, ...]
    head: Linear
    buffers: frozenset[str] = frozenset()
    kind: Literal["sequence"] = "sequence"

    @property
    def pure(self) -> bool:
        return True

    def init(self, seed: int) -> Tree:
        generator = torch.Generator().manual_seed(seed)
        table = torch.empty(self.vocabulary, self.embedding).normal_(generator=generator)
        variables: dict[str, Tensor] = {"embedding.weight": table}
        for layer in self.layers:
            variables |= layer.init(generator)
        return variables | self.head.init(generator)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        states = functional.embedding(x.select(-2, 0), variables["embedding.weight"])
        for layer in self.layers:
            states = layer(variables, states)
        return Outputs(self.head(variables, states), states, {}), {}


def gru(
    input_shape: tuple[int, ...],
    outputs: int,
    embedding: PositiveInt = 32,
    hidden: PositiveInt = 128,
    layers: PositiveInt = 1,
) -> Recurrent:
    """A recurrent network with embeddings of 32 and one layer of 128 by default.

    ``outputs`` is the size of the vocabulary. Raises ConfigurationError if samples are not texts.
    """
    token_length("gru", input_shape)
    widths = (embedding, *[hidden] * layers)
    gates = tuple(Gated(f"gru{i + 1}", widths[i], hidden) for i in range(layers))
    return Recurrent(outputs, embedding, gates, Linear("output", hidden, outputs))
