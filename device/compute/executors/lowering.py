"""A program's functions, lowered to functions of flat lists of tensors, for one device or for a stack.

Each function is traced once per set of input layouts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedemu.algorithms.interface import LocalProgram, Outcome
from fedemu.algorithms.layouts import laid_out
from fedemu.algorithms.models.randomness.draws import Draws
from fedemu.algorithms.models.randomness.random_functions import Keyed
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.device.compute.executors.arguments import Arguments, Names
from fedemu.device.compute.executors.plain import plain
from fedemu.device.compute.executors.promises import as_leaf, finished, stepped
from fedemu.device.compute.tapes.alike import all_alike
from fedemu.device.compute.tapes.flat_function import Flat
from fedemu.device.compute.tapes.own_rows import OwnRows
from fedemu.device.compute.tapes.private_torch import TreeSpec, tree_flatten, tree_unflatten
from fedemu.device.compute.tapes.tracing import Untraceable, differentiable, trace
from fedemu.device.compute.tapes.writing import nothing_written
from fedemu.protocol.errors import TrainingError

MAX_CACHED = 512
"""The number of traced functions that are kept. One takes a few kilobytes."""


@dataclass(frozen=True)
class Lowered:
    """A function of flat lists of tensors. ``spec`` is the form of what the program's own function returns.

    ``draws`` says whether it draws random numbers. If not, its key does not matter. ``untraced`` does the same without
    recorded operations; its errors have the frames of the program. ``recorded`` says whether ``function`` has them.
    """

    function: Flat
    spec: TreeSpec
    draws: bool
    untraced: Flat
    recorded: bool

    def run(self, given: Arguments) -> Sequence[Tensor]:
        """The leaves of the result."""
        try:
            return self.function(*given.flat())
        except Exception:
            # The recorded operations do not know which line of the program they come from. The program itself does.
            self.untraced(*given.flat())
            raise

    @property
    def capturable(self) -> bool:
        """Whether it may become a CUDA graph. Recorded operations read no values, and draw by the key."""
        return self.recorded

    @property
    def metrics(self) -> dict[str, int]:
        """The place of each metric among the outputs of a step."""
        places: dict[str, int] = tree_unflatten(list(range(self.spec.num_leaves)), self.spec)[1]
        return places


class Lowering:
    """Lowers programs for one device (``stack`` None) or for a stack, whose tensors have a leading dimension.

    If they are ``plain``, they are neither recorded nor differentiated by ``torch.func`` (``plain.py``).
    """

    def __init__(self, stack: int | None, plain: bool = False) -> None:
        self.stack = stack
        self.plain = plain
        self._cache: dict[Hashable, tuple[LocalProgram, Lowered]] = {}

    def begin(self, program: LocalProgram, names: Names, given: Arguments) -> Lowered:
        """The program's ``begin``: (shared, each, own, facts, key) -> carry."""

        def begin(given: Arguments) -> Any:
            return program.begin(*names.inputs(given))

        return self._lowered(program, "begin", names, begin, given)

    def step(self, program: LocalProgram, stage: int, names: Names, carry_spec: TreeSpec, given: Arguments) -> Lowered:
        """A step of a stage: (shared, each, own, facts, key, batch, noise, carry) -> (carry, metrics).

        The new carry has the memory layout of the given one. The step may write over the memory of the given carry, so
        no other tensor may share that memory.
        """
        stage_step = program.stages[stage].step

        def step(given: Arguments) -> Any:
            carry = tree_unflatten(list(given.carry), carry_spec)
            return stepped(stage_step(carry, names.batch(given), *names.inputs(given), names.drawn(given)), carry_spec)

        strides = [leaf.stride() for leaf in given.carry]
        return self._lowered(program, f"step/{stage}", names, step, given, strides, apart=len(strides))

    def finish(self, program: LocalProgram, names: Names, carry_spec: TreeSpec, given: Arguments) -> Lowered:
        """The program's ``finish``: (shared, each, own, facts, key, carry) -> Outcome.

        It may write over the memory of the given carry. If it is ``recorded``, its results share no memory with
        anything else.
        """

        def finish(given: Arguments) -> Outcome:
            return finished(program.finish(tree_unflatten(list(given.carry), carry_spec), *names.inputs(given)))

        return self._lowered(program, "finish", names, finish, given, apart=sys.maxsize)

    def _lowered(
        self,
        program: LocalProgram,
        what: str,
        names: Names,
        function: Callable[[Arguments], Any],
        given: Arguments,
        strides: Sequence[tuple[int, ...]] = (),
        apart: int = 0,
    ) -> Lowered:
        key = (id(program), what, names, *((t.shape, t.stride(), t.dtype, t.device) for t in given.flat()))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            # The program is kept too, so that no other program gets its id.
            found = self._cache[key] = (program, self._lower(names, function, given, strides, apart))
        return found[1]

    def _lower(
        self,
        names: Names,
        function: Callable[[Arguments], Any],
        given: Arguments,
        strides: Sequence[tuple[int, ...]],
        apart: int,
    ) -> Lowered:
        """The first outputs get ``strides``. The carry is free to be written to, and so many outputs are ``apart``.

        The function is called once with copies, so that nothing that it writes to counts twice. Raises TrainingError if
        it writes to what is not its own.
        """
        spec: TreeSpec | None = None
        drawn = 0
        reach = nullcontext if self.stack is None else OwnRows
        lengths = given.lengths  # not ``given``: ``flat`` may stay in the cache, and would keep all its tensors alive

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            nonlocal spec, drawn
            given = Arguments.cut(leaves, lengths)
            draws = Draws(given.key[0])
            with reach(), Keyed(draws):
                outputs, spec = tree_flatten(function(given))
            drawn = draws.count
            return tuple(as_leaf(output, function.__name__) for output in outputs)

        with torch.inference_mode(False), torch.no_grad():
            inputs = [laid_out(leaf, leaf.stride()) if _has_places_of_its_own(leaf) else leaf for leaf in given.flat()]
        mapped: Callable[..., tuple[Tensor, ...]] = flat
        if self.stack is not None:
            in_dims = tuple(None if i < len(given.shared) else 0 for i in range(len(inputs)))
            mapped = torch.func.vmap(flat, in_dims=in_dims)

        def stacked(*leaves: Tensor) -> list[Tensor]:
            outputs = list(mapped(*leaves))
            for i, stride in enumerate(strides):
                if outputs[i].stride() != stride:
                    outputs[i] = laid_out(outputs[i], stride)
            if self.stack is not None:
                outputs = [output.contiguous() for output in outputs]
            return outputs

        def untraced(*leaves: Tensor) -> list[Tensor]:
            with torch.inference_mode(False), torch.no_grad(), without_compiler(), all_alike(self.stack or 0):
                return stacked(*differentiable(leaves))

        def by_autograd(*leaves: Tensor) -> list[Tensor]:
            with torch.inference_mode(False), torch.no_grad():
                leaves = tuple(differentiable(leaves))
                with plain(Arguments.cut(leaves, lengths).key[0]):
                    return stacked(*leaves)

        run: Flat
        recorded = False
        with nothing_written(names.read_only(Arguments.cut(inputs, lengths)), _written):
            if self.plain:
                run = by_autograd
                run(*inputs)  # it tells the form of the result
            else:
                try:
                    with warnings.catch_warnings():
                        # vmap tells that it computes some operation, such as an LSTM, device by device.
                        warnings.filterwarnings("ignore", "There is a performance drop")
                        run = trace(stacked, inputs, spent=len(given.carry), apart=apart, slots=self.stack or 0)
                    recorded = True
                except Untraceable:
                    run = untraced
        assert spec is not None
        return Lowered(run, spec, drawn > 0, untraced, recorded)


def _written(name: str) -> TrainingError:
    return TrainingError(f"it writes to {name}, which other steps or other devices read, too; let it make a new tensor")


def _has_places_of_its_own(tensor: Tensor) -> bool:
    """Whether each element has a place of its own in memory, unlike those of an expanded tensor."""
    return all(stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
