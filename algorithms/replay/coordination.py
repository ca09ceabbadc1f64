"""Coordinated selection: devices and coordinator agree on what the fleet keeps, by weighted sums of gradients alone.

Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", 2023, section 4.3 and algorithm 1.
Device m finds the relaxed ``x_m`` whose sum of gradient directions ``G_m x_m`` is nearest to its target ``h_m``, which
is 0 at first. The coordinator answers the sums with new targets, ``h_m = G_m x_m - mean over devices``, which add up to
0 (problem 8). The mean is over all devices that have answered in this period. A device that has since gone away still
counts, with its last sum.

There are two forms on the wire:

- ``mean``: a device remembers its sum and sends the change of it. The coordinator holds only the total, and sends the
  mean to all devices alike.
- ``each``: devices send their sums. The coordinator holds all of them, and sends every device its own target.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Context,
    Facts,
    Forest,
    Memory,
    Outcome,
    Query,
    Reducer,
    Reply,
    Tree,
    collect,
    total,
)
from fedemu.algorithms.replay.exchange import EACH, Settled, is_of
from fedemu.algorithms.replay.lens import Lens
from fedemu.algorithms.replay.queries import Select
from fedemu.algorithms.replay.selection.candidates import Floats, Positions
from fedemu.algorithms.replay.selection.capped_simplex import solve_capped_simplex
from fedemu.algorithms.replay.selection.diversity import select_top
from fedemu.algorithms.trees import add, map_leaves, squared_norm, subtract, without
from fedemu.protocol.ids import DeviceId

GRADIENT_SUM: Final = "gradient_sum"
_MEAN: Final = "mean"
_CHANGE, _JOINED, _SUM = "change", "joined", "sum"
_DEVICES = "devices"
_X = "x"
_OWN_SUM = "sum."

Form = Literal["mean", "each"]
"""The form of sums and targets on the wire; the module's docstring explains both."""


class Targets(Protocol):
    """The coordinator's part: it takes the devices' sums and makes targets of them."""

    @property
    def reduce(self) -> Mapping[str, Reducer]:
        """The reducer of each key of the devices' payload."""
        ...

    @property
    def devices(self) -> int:
        """The number of devices that have answered in this period."""
        ...

    def add(self, reply: Reply) -> None:
        """Take the sums of one reply."""
        ...

    def total(self) -> Tree:
        """The sum over the devices' last sums, in float64; empty before the first reply."""
        ...

    def shared(self) -> Forest:
        """The trees from which a device finds its target, for all devices alike."""
        ...

    def each(self) -> Mapping[DeviceId, Tree] | None:
        """The target of each device; None if targets are not sent one by one."""
        ...


@dataclass
class MeanTargets:
    """The form ``mean``: it holds only the total of all devices, in float64. The mean is sent in the leaves' own dtype.

    ``last`` is the last change, whose leaves have that dtype.
    """

    devices: int = 0
    sums: Tree = field(default_factory=dict)
    last: Tree = field(default_factory=dict)
    reduce: Mapping[str, Reducer] = field(default_factory=lambda: {_CHANGE: total, _JOINED: total})

    def add(self, reply: Reply) -> None:
        self.last = reply.values[_CHANGE]
        change = map_leaves(Tensor.double, self.last)
        self.sums = add(self.sums, change) if self.sums else change
        # A device joins once at most, whatever it says.
        self.devices += min(max(0, int(reply.values[_JOINED][_DEVICES])), len(reply.devices))

    def total(self) -> Tree:
        return self.sums

    def shared(self) -> Forest:
        if not self.devices:
            return {}
        return {_MEAN: map_leaves(lambda leaf, like: (leaf / self.devices).to(like.dtype), self.sums, self.last)}

    def each(self) -> None:
        return None


@dataclass
class EachTargets:
    """The form ``each``: it holds the last sum of every device."""

    sums: dict[DeviceId, Tree] = field(default_factory=dict)
    reduce: Mapping[str, Reducer] = field(default_factory=lambda: {_SUM: collect})

    @property
    def devices(self) -> int:
        return len(self.sums)

    def add(self, reply: Reply) -> None:
        for handle in reply.values[_SUM]:
            self.sums[handle.device] = handle.load()

    def total(self) -> Tree:
        whole: Tree = {}
        for device in sorted(self.sums):
            one = map_leaves(Tensor.double, self.sums[device])
            whole = add(whole, one) if whole else one
        return whole

    def shared(self) -> Forest:
        return {}

    def each(self) -> Mapping[DeviceId, Tree]:
        mean = map_leaves(lambda leaf: leaf / self.devices, self.total())
        return {device: map_leaves(_difference, own, mean) for device, own in self.sums.items()}


TARGETS: Final[Mapping[Form, type[MeanTargets] | type[EachTargets]]] = {"mean": MeanTargets, "each": EachTargets}


def _difference(own: Tensor, mean: Tensor) -> Tensor:
    return (own.double() - mean).to(own.dtype)


def fleet_objective(total: Tree) -> float:
    """The objective ``‖sum over devices of G_m x_m‖²`` (problem 6), from that sum; 0 if no device has answered.

    With the relaxed x of all devices it is what the exchange lowers. With an x of 1 for each sample that is kept, and 0
    for the others, it is the objective of what the fleet keeps (problem 3 over all devices).
    """
    return float(squared_norm(map_leaves(Tensor.double, total)))


def target(memory: Memory, shared: Forest, own: Tree) -> Tree | None:
    """The device's target ``h_m``; None if it has not answered in this period, or if no targets were sent."""
    if not is_of(memory, shared) or _X not in own:
        return None
    if EACH in shared:
        return shared[EACH]
    return subtract(_own_sum(own), shared[_MEAN]) if _MEAN in shared else None


def _own_sum(own: Tree) -> Tree:
    return {name.removeprefix(_OWN_SUM): leaf for name, leaf in own.items() if name.startswith(_OWN_SUM)}


def _solution(own: Tree) -> Floats:
    solution: Floats = own[_X].cpu().numpy()
    return solution


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A device comes near its target by the convex relaxation, and answers with the sum of gradient directions ``G x``.

    With the form ``mean`` the payload is the ``change`` of the sum, which was 0 before the first answer, and the number
    of devices that have ``joined``: 1 in a first answer. With the form ``each`` it is the ``sum``. ``passes`` counts
    one pass for the Gram matrix, one for the products with the target and one for the sum, as if nothing were
    remembered.
    """

    lens: Lens
    form: Form
    passes: float = 3.0
    declares_label_counts: bool = False

    def payload(self, shared: Forest) -> Forest:
        trained = without(shared["model"], self.lens.model.buffers)
        if self.form == "each":
            return {_SUM: trained}
        return {_CHANGE: trained, _JOINED: {_DEVICES: torch.zeros(1, dtype=torch.int64)}}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        directions = self.lens.directions(memory, shared, facts)
        aim = target(memory, shared, own)
        linear = None if aim is None else directions.products(aim)
        x = solve_capped_simplex(directions.gram, memory.budget, linear, start=_start(own, memory))
        summed = directions.weighted_sum(x)
        remembered = {_X: torch.from_numpy(x)}
        if self.form == "each":
            return Outcome({_SUM: summed}, remembered), None
        joined = torch.tensor([0 if _X in own else 1])
        change = subtract(summed, _own_sum(own)) if _X in own else summed
        kept = {_OWN_SUM + name: leaf for name, leaf in summed.items()}
        return Outcome({_CHANGE: change, _JOINED: {_DEVICES: joined}}, remembered | kept), None


def _start(own: Tree, memory: Memory) -> Floats | None:
    """The last x, from which the objective can only fall. None if there is none, or one of fewer samples.

    It is also None if the budget is large enough for all samples.
    """
    return _solution(own) if _X in own and memory.budget < len(own[_X]) == len(memory.fresh) else None


@dataclass(frozen=True, eq=False)
class CoordinatedSelect(Select):
    """A device keeps the samples with the N largest values of the x that comes nearest to its target.

    A device that has answered but has no target, because it came back after the exchange, keeps the N largest values
    of its last x; samples that arrived since then come last. A device that has not answered selects by ``strategy``,
    alone. ``passes`` counts one pass for the Gram matrix and one for the products with the target.

    The last x is solved with ``zero_diagonal`` by default. This departs from the paper, whose algorithm 1 keeps the
    convex problem to the end, and the reason is measured (``docs/benchmarks.md``). A convex x is spread over many
    samples, so its N largest values can be a poor choice: on the paper's synthetic vectors (appendix C.1; 100 devices
    keep 5 of 50) their objective is 5.35 times that of a selection without coordination. Without the diagonal nearly
    every x is 0 or 1, and it is 1.01 times. On vectors with something to coordinate the two are alike.
    """

    zero_diagonal: bool = True
    restarts: int = 0
    passes: float = 2.0

    def choose(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> Positions:
        size = len(memory.fresh)
        if _X not in own or not 0 < memory.budget < size:
            return super().choose(memory, shared, own, facts)
        aim = target(memory, shared, own)
        if aim is None:
            x = np.zeros(size)
            x[: len(own[_X])] = _solution(own)
        else:
            directions = self.lens.directions(memory, shared, facts)
            x = solve_capped_simplex(
                directions.gram,
                memory.budget,
                directions.products(aim),
                self.zero_diagonal,
                start=None if self.zero_diagonal else _start(own, memory),
                restarts=self.restarts if self.zero_diagonal else 0,
                generator=memory.generator,
            )
        return select_top(x, memory.budget)


@dataclass(frozen=True, eq=False)
class GradientExchange:
    """``iterations`` times devices send sums, and the coordinator makes targets of them."""

    sums: GradientSum
    iterations: int

    @property
    def programs(self) -> Mapping[str, Query]:
        return {GRADIENT_SUM: self.sums}

    def play(self, shared: Forest, context: Context) -> Generator[Ask, Reply, Settled]:
        targets: Targets = TARGETS[self.sums.form]()
        objectives: list[float] = []
        answered: list[int] = []
        for _ in range(self.iterations):
            sent = {**shared, **targets.shared()}
            reply = yield Ask(GRADIENT_SUM, sent, targets.reduce, "online", targets.each(), optional=True)
            if reply.devices:
                targets.add(reply)
            objectives.append(fleet_objective(targets.total()))
            answered.append(targets.devices)
        said = {"devices": targets.devices, "answered": answered, "objective": objectives}
        return Settled(targets.shared(), targets.each(), {"coordination": said})
