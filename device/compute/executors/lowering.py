"""A program's functions on flat lists of tensors, for one device or for a stack, traced once per set of layouts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fedemu.algorithms.interface import Batch, Facts, Forest, LocalProgram, Outcome, Tree
from fedemu.device.compute.executors.cohort import EACH, PACKED, unpacked
from fedemu.device.compute.executors.tape import Flat
from fedemu.device.compute.executors.tracing import Untraceable, differentiable, trace, without_compiler

MAX_CACHED = 512
"""Traced functions kept; one is a few kilobytes."""


@dataclass(frozen=True)
class Names:
    """Which leaf of a flat list is what: the shared trees', then the device's own part, own state, and the facts."""

    shared: tuple[tuple[str, str], ...]
    each: tuple[str, ...]
    own: tuple[str, ...]
    noise: tuple[str, ...]

    @classmethod
    def of(cls, shared: Forest, each: Tree, own: Tree, program: LocalProgram) -> Names:
        return cls(
            tuple((key, name) for key, tree in shared.items() for name in tree),
            tuple(each),
            tuple(own),
            tuple(sorted(program.noise)),
        )

    def take(self, leaves: Sequence[Tensor]) -> tuple[Forest, Tree, Facts]:
        """Shared forest, own state and facts again, from the head of a flat list."""
        shared: dict[str, dict[str, Tensor]] = {}
        position = 0
        for key, name in self.shared:
            shared.setdefault(key, {})[name] = leaves[position]
            position += 1
        if self.each:
            shared[EACH] = dict(zip(self.each, leaves[position:], strict=False))
            position += len(self.each)
        own = dict(zip(self.own, leaves[position:], strict=False))
        position += len(self.own)
        return shared, own, unpacked(*leaves[position : position + PACKED])

    @property
    def taken(self) -> int:
        return len(self.shared) + len(self.each) + len(self.own) + PACKED


@dataclass(frozen=True)
class Lowered:
    """``run`` takes and returns flat lists; ``spec`` is the form of what the function itself returns."""

    run: Flat
    spec: TreeSpec

    @property
    def metrics(self) -> dict[str, int]:
        """Of a step: where among its outputs each metric is."""
        places: dict[str, int] = tree_unflatten(list(range(self.spec.num_leaves)), self.spec)[1]
        return places


class Lowering:
    """Lowers programs for one device (``stack`` None) or for a stack, whose tensors have a leading dimension."""

    def __init__(self, stack: int | None) -> None:
        self.stack = stack
        self._cache: dict[Hashable, tuple[LocalProgram, Lowered]] = {}

    def begin(self, program: LocalProgram, names: Names, common: Sequence[Tensor]) -> Lowered:
        """(shared, each, own, facts) -> carry."""

        def begin(*leaves: Tensor) -> Any:
            return program.begin(*names.take(leaves))

        return self._lowered(program, "begin", names, begin, common, len(names.shared))

    def step(
        self,
        program: LocalProgram,
        stage: int,
        names: Names,
        carry_spec: TreeSpec,
        common: Sequence[Tensor],
        batch: Sequence[Tensor],
        noise: Sequence[Tensor],
        carry: Sequence[Tensor],
    ) -> Lowered:
        """(shared, each, own, facts, x, y, weight, noise, carry) -> (carry, metrics).

        The carry keeps its memory layout, and its memory is used up: it must be nobody else's.
        """
        step = program.stages[stage].step

        def one_step(*leaves: Tensor) -> Any:
            shared, own, facts = names.take(leaves)
            rest = leaves[names.taken :]
            drawn = dict(zip(names.noise, rest[3:], strict=False))
            carried = tree_unflatten(list(rest[3 + len(names.noise) :]), carry_spec)
            after, metrics = step(carried, Batch(*rest[:3]), shared, own, facts, drawn)
            if (spec := tree_flatten(after)[1]) != carry_spec:
                raise TypeError(f"step returned a carry of the form {spec} where it was given {carry_spec}")
            return after, dict(metrics)

        inputs = [*common, *batch, *noise, *carry]
        return self._lowered(program, f"step/{stage}", names, one_step, inputs, len(names.shared), carry)

    def finish(
        self,
        program: LocalProgram,
        names: Names,
        carry_spec: TreeSpec,
        common: Sequence[Tensor],
        carry: Sequence[Tensor],
    ) -> Lowered:
        """(shared, each, own, facts, carry) -> Outcome."""

        def finish(*leaves: Tensor) -> Outcome:
            shared, own, facts = names.take(leaves)
            return program.finish(tree_unflatten(list(leaves[names.taken :]), carry_spec), shared, own, facts)

        return self._lowered(program, "finish", names, finish, [*common, *carry], len(names.shared))

    def _lowered(
        self,
        program: LocalProgram,
        what: str,
        names: Names,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        unstacked: int,
        layout: Sequence[Tensor] = (),
    ) -> Lowered:
        key = (id(program), what, names, *((t.shape, t.stride(), t.dtype, t.device) for t in inputs))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            found = self._cache[key] = (program, self._lower(function, inputs, unstacked, [t.stride() for t in layout]))
        return found[1]

    def _lower(
        self, function: Callable[..., Any], inputs: Sequence[Tensor], unstacked: int, strides: Sequence[tuple[int, ...]]
    ) -> Lowered:
        spec: TreeSpec | None = None

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            nonlocal spec
            outputs, spec = tree_flatten(function(*leaves))
            return tuple(torch.as_tensor(output) for output in outputs)

        mapped: Callable[..., tuple[Tensor, ...]] = flat
        if self.stack is not None:
            in_dims = tuple(None if i < unstacked else 0 for i in range(len(inputs)))
            mapped = torch.func.vmap(flat, in_dims=in_dims)

        def laid_out(*leaves: Tensor) -> list[Tensor]:
            outputs = list(mapped(*leaves))
            for i, stride in enumerate(strides):
                outputs[i] = _with_stride(outputs[i], stride)
            if self.stack is not None:
                outputs = [output.contiguous() for output in outputs]
            return outputs

        def untraced(*leaves: Tensor) -> list[Tensor]:
            with torch.inference_mode(False), torch.no_grad(), without_compiler():
                return laid_out(*differentiable(leaves))

        try:
            run = trace(laid_out, inputs, spent=len(strides))
        except Untraceable:
            run = untraced
        assert spec is not None
        return Lowered(run, spec)


def _with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
