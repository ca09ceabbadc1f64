"""The generators by which code draws that knows no key: those of Python, numpy and torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fedemu.protocol.generators import seeded


def generators_for(device: torch.device) -> list[torch.Generator]:
    """torch's own generators by which code draws that computes on this device: that of processors, and a GPU's."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        )
    return found


@contextmanager
def all_seeded(seed: int, generators: Sequence[torch.Generator], torch_seed: int | None = None) -> Iterator[None]:
    """A context in which Python, numpy and these generators of torch draw by a seed below 2**64.

    ``torch_seed`` is another seed for those of torch. At the end all are as they were before. ``torch.manual_seed``
    would seed those of all GPUs, and takes sixty times as long, because it notes where it was called.
    """
    with seeded(seed):
        before = [each.get_state() for each in generators]
        for each in generators:
            each.manual_seed(seed if torch_seed is None else torch_seed)
        try:
            yield
        finally:
            for each, state in zip(generators, before, strict=True):
                each.set_state(state)
