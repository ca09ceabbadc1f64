"""Steps as CUDA graphs: what a step launches is recorded once, and from then on launched by a single call.

A step of a small model is a hundred kernels that run for microseconds each, and Python takes longer to launch them. A
graph needs two things of a step: the same shapes each time, and no state that is hidden in it, such as that of a
generator of random numbers.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, Protocol
from weakref import ref

import torch
from torch import Tensor

from fedemu.algorithms.layouts import address, geometry

log = logging.getLogger(__name__)

ORDINARY_STEPS: Final = 3
"""So many times a step runs as it is before it is captured, because a capture takes as long as some steps."""
MOST_GRAPHS: Final = 8
"""The number of graphs that are kept. The one that was not used for the longest time goes first."""
MOST_BYTES: Final = 2**30
"""The most bytes of the inputs of all graphs, of which a graph has copies. Kernels on large ones leave no gaps."""
MOST_COUNTED: Final = 512
"""The number of steps whose calls are counted. The counts are a few bytes each, and keep their steps alive."""

Work = Callable[[], Sequence[Tensor]]


class Given(Protocol):
    """The inputs of a step."""

    @property
    def carry(self) -> Sequence[Tensor]:
        """What the step changes, and the next step gets."""
        ...

    def flat(self) -> list[Tensor]:
        """All inputs. The carry comes last."""
        ...


class Step(Protocol):
    """A function of tensors on a GPU that is called again and again with inputs that lie alike."""

    @property
    def capturable(self) -> bool:
        """Whether it may be captured, as far as is known so far."""
        ...

    @property
    def function(self) -> Callable[..., Sequence[Tensor]]:
        """The function of the flat inputs. It returns the next carry, and then what else it found."""
        ...

    def run(self, given: Any) -> Sequence[Tensor]:
        """The same as an ordinary call."""
        ...


class Recorder(Protocol):
    """Records work on a GPU."""

    def record(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], object]]:
        """The tensors that ``work`` returns, and a function that does its operations again, on the same memory.

        The tensors have values after the first call of that function. What ``work`` writes to may hold anything before.
        """
        ...


class GraphRecorder:
    """Records CUDA graphs. They share a pool of memory: what a graph has made is never read after another one ran.

    After a capture that failed, the next ones have a new pool.
    """

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], object]]:
        before, stream = torch.cuda.current_stream(), self._stream
        # Libraries keep handles and workspaces for each stream. So the work is done on this stream before it is
        # captured there, and they are made then.
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    work()
        finally:
            # If the work fails, the caller frees tensors to which kernels on the stream may still write.
            before.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may encode results meanwhile. What they ask of the driver must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = work()
        except BaseException:
            self._give_up(before)
            raise
        return outputs, graph.replay

    def _give_up(self, before: torch.cuda.Stream) -> None:
        """Clean up after a capture that failed; ``before`` was the current stream. torch itself does it only in part.

        It leaves the stream of the capture current. In versions such as 2.11 its allocator also takes the capture for
        one that goes on: it then refuses the next one in the pool, and frees nothing when the GPU has no memory left.
        """
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # it says that the allocator has ended it already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        # Pinned memory may still belong to a capture in that pool, and nothing can end that.
        del self._stream, self._pool


class Captured:
    """One step, whose inputs have their places. The next carry is written over the given one there."""

    def __init__(self, step: Step, given: Given, recorder: Recorder) -> None:
        self.step = step
        leaves = given.flat()
        self._fixed = len(leaves) - len(given.carry)
        # Inference tensors cannot be written to outside of inference mode, and torch writes to its own at each capture.
        with torch.inference_mode(False), torch.no_grad():
            self._places = [
                torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device) for leaf in leaves
            ]
            self._taken: list[Callable[[], Tensor | None]] = [lambda: None] * len(leaves)
            self._take(leaves)
            self._outputs, self._replay = recorder.record(self._work)

    @property
    def nbytes(self) -> int:
        """The size of the inputs in bytes."""
        return sum(place.nbytes for place in self._places)

    def run(self, given: Given) -> list[Tensor]:
        """The outputs of the step. The carry among them changes with the next call, to which it may be given."""
        self._take(given.flat())
        self._replay()
        return [*self._places[self._fixed :], *(leaf.clone() for leaf in self._outputs)]

    def _take(self, leaves: Sequence[Tensor]) -> None:
        """Copy the inputs to their places, if they are not there. Only the place of a carry is ever written over."""
        for i, (place, leaf) in enumerate(zip(self._places, leaves, strict=True)):
            if leaf is place or (i < self._fixed and self._taken[i]() is leaf):
                continue
            place.copy_(leaf)
            self._taken[i] = ref(leaf)

    def _work(self) -> list[Tensor]:
        """Do the step at the places, and return its metrics."""
        carry = self._places[self._fixed :]
        outputs = list(self.step.function(*self._places))
        written = {address(place) for place in carry}
        places = [*map(geometry, carry), *[None] * (len(outputs) - len(carry))]
        # What lies in the place of a carry would be written over while it is still to be read.
        outputs = [
            leaf.clone() if address(leaf) in written and geometry(leaf) != place else leaf
            for leaf, place in zip(outputs, places, strict=True)
        ]
        for place, leaf in zip(carry, outputs, strict=False):
            if geometry(leaf) != geometry(place):
                place.copy_(leaf)
        return outputs[len(carry) :]


class Captures:
    """Runs steps, and captures those that come again and again. ``most`` graphs have inputs of ``most_bytes`` at most.

    A step stays ordinary if it is not capturable, if its inputs are too large, if the capture fails, or if the graph
    gives other bits than the step itself, which is tried once for each graph.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_GRAPHS, most_bytes: int = MOST_BYTES) -> None:
        self._recorder, self._most, self._most_bytes = recorder, most, most_bytes
        self._captured: OrderedDict[int, Captured] = OrderedDict()
        self._runs: dict[int, tuple[Step, float]] = {}
        """How often each ordinary step ran, by its id; minus infinity for those that stay ordinary."""

    def __len__(self) -> int:
        """The number of graphs."""
        return len(self._captured)

    def run(self, step: Step, given: Given) -> Sequence[Tensor]:
        """The outputs of a step; it may write over the given carry."""
        captured = self._captured.get(id(step))
        if captured is not None:
            self._captured.move_to_end(id(step))
            return captured.run(given)
        _, runs = self._runs.get(id(step), (step, 0))
        if runs >= ORDINARY_STEPS and step.capturable:
            return self._first(step, given)
        self._keep(step, runs + 1)
        return step.run(given)

    def _keep(self, step: Step, runs: float) -> None:
        if len(self._runs) >= MOST_COUNTED:
            self._runs.clear()
        self._runs[id(step)] = step, runs  # with the step itself, so that no other one gets its id

    def _first(self, step: Step, given: Given) -> Sequence[Tensor]:
        """Capture a step, and run it in both ways."""
        size = sum(leaf.nbytes for leaf in given.flat())
        captured, outputs = None, []
        if size <= self._most_bytes:
            self._make_room(size)
            try:
                captured = Captured(step, given, self._recorder)
                outputs = captured.run(given)
            except Exception as error:
                log.warning("a step is not captured as a CUDA graph: %s", str(error).partition("\n")[0])
                captured = None
        expected = step.run(given)
        if captured is None or not step.capturable:
            self._keep(step, -math.inf)
        elif not all(map(_same_bits, outputs, expected)):
            log.warning("a CUDA graph gives other bits than its step, which stays as it is")
            self._keep(step, -math.inf)
        else:
            self._captured[id(step)] = captured
            del self._runs[id(step)]
        return expected

    def _make_room(self, size: int) -> None:
        held = sum(captured.nbytes for captured in self._captured.values())
        while self._captured and (len(self._captured) >= self._most or held + size > self._most_bytes):
            held -= self._captured.popitem(last=False)[1].nbytes


def _same_bits(one: Tensor, other: Tensor) -> bool:
    first, second = (leaf.contiguous().reshape(-1).view(torch.uint8) for leaf in (one, other))
    return torch.equal(first, second)
