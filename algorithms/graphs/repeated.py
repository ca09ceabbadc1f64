"""What a server job does again and again. On a GPU it becomes a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from fedemu.algorithms.graphs.captures import Captures, GraphRecorder, Recorder
from fedemu.algorithms.interface import Tree
from fedemu.algorithms.layouts import Layout
from fedemu.algorithms.models.randomness.random_functions import drawn
from fedemu.algorithms.trees import map_leaves

Iteration = Callable[[Tree, Tree, Tree], Tree]
"""(carry, fixed, given) -> the next carry, which has the same names.

It is a pure function: the tensors of the three trees decide, and nothing else. ``fixed`` is the same for many
iterations, such as data, and ``given`` belongs to one, such as the rows of its batch.
"""

FindRecorder = Callable[[torch.device], Recorder | None]


def graph_recorder(device: torch.device) -> Recorder | None:
    """What records on this device: CUDA graphs on a GPU. None on a processor, which records nothing."""
    return GraphRecorder() if device.type == "cuda" else None


_find: ContextVar[FindRecorder] = ContextVar("find", default=graph_recorder)


@contextmanager
def recorded_by(find: FindRecorder) -> Iterator[None]:
    """A context in which iterations are recorded by what ``find`` gives for their device."""
    token = _find.set(find)
    try:
        yield
    finally:
        _find.reset(token)


class Repeated:
    """Does an iteration many times. On a GPU it is captured once for each layout of its tensors.

    It stays ordinary where a model draws random numbers, because the key would be hidden in the graph, and where the
    next carry lies otherwise in memory than the carry. An iteration that reads values of a GPU, or that copies from
    host memory, cannot be captured: it stays ordinary, too, and a warning says so.
    """

    def __init__(self, iteration: Iteration) -> None:
        self._iteration = iteration
        self._captures: dict[torch.device, Captures | None] = {}
        self._steps: dict[Hashable, _Step] = {}

    def over(self, carry: Tree, fixed: Tree, inputs: Iterable[Tree], device: torch.device) -> Tree:
        """The carry after one iteration for each of ``inputs``. All tensors lie on ``device``."""
        if device not in self._captures:
            recorder = _find.get()(device)
            self._captures[device] = None if recorder is None else Captures(recorder)
        captures = self._captures[device]
        if captures is None:
            for given in inputs:
                carry = self._iteration(carry, fixed, given)
            return carry
        for given in inputs:
            names = tuple(fixed), tuple(given), tuple(carry)
            fit = _Inputs([*fixed.values(), *given.values()], [*carry.values()])
            key = device, names, tuple(map(Layout.of, fit.flat()))
            step = self._steps.setdefault(key, _Step(self._iteration, names))
            carry = dict(zip(names[2], captures.run(step, fit), strict=True))
        # The next call writes over what the graph gave.
        return map_leaves(Tensor.clone, carry)


class Constant:
    """A tensor that iterations read. It is copied to a device once, because what is captured may copy nothing."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The tensor on this device."""
        if device not in self._copies:
            self._copies[device] = self._tensor.to(device)
        return self._copies[device]


def uploaded(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Tensors of one dtype on a GPU, in one copy from host memory. On a processor they are the same tensors."""
    if device.type == "cpu" or not parts:
        return parts
    flat = torch.cat([part.reshape(-1) for part in parts]).to(device)
    pieces = torch.split(flat, [part.numel() for part in parts])
    # Where a tensor begins in memory can change how it is multiplied, so each has memory of its own.
    return [piece.reshape(part.shape).clone() for piece, part in zip(pieces, parts, strict=True)]


@dataclass(frozen=True)
class _Inputs:
    others: list[Tensor]
    carry: list[Tensor]

    def flat(self) -> list[Tensor]:
        return [*self.others, *self.carry]


class _Step:
    """An iteration whose tensors have these names: of what is fixed, of what is given, and of the carry."""

    def __init__(self, iteration: Iteration, names: tuple[tuple[str, ...], ...]) -> None:
        self._iteration, self._names = iteration, names
        self.capturable = True

    def function(self, *leaves: Tensor) -> list[Tensor]:
        rest = iter(leaves)
        fixed, given, carry = ({name: next(rest) for name in names} for names in self._names)
        with torch.enable_grad():
            after = self._iteration(carry, fixed, given)
        return [after[name].detach() for name in carry]

    def run(self, given: _Inputs) -> list[Tensor]:
        before = drawn()
        after = self.function(*given.flat())
        # Each time anew: a model of somebody's own takes a seed at first, until it has shown that it draws nothing.
        self.capturable = drawn() == before and list(map(Layout.of, after)) == list(map(Layout.of, given.carry))
        return after
