"""The most that a device can say of its samples: it has no others than those that the stream has brought it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.coordinator.asks.payload import PayloadError
from fedemu.protocol.ids import DeviceId


@dataclass(frozen=True)
class Holdings:
    """The ``arrivals`` of all devices, and the ``labels [samples]`` of the training split, of ``classes`` classes."""

    arrivals: Arrivals
    labels: NDArray[np.integer[Any]]
    classes: int

    def check(self, device: DeviceId, task: int, examples: int, label_counts: tuple[int, ...] | None) -> None:
        """Raise PayloadError (examples, label_counts) if a device claims more than has arrived by the end of ``task``.

        A replay buffer has only samples that arrived before, so it gives no more.
        """
        arrived = self.arrivals.everything(device, task)
        if examples > len(arrived):
            raise PayloadError(
                "examples", f"{examples} examples, but the stream has brought this device {len(arrived)} so far"
            )
        if label_counts is None:
            return
        most = np.bincount(self.labels[arrived], minlength=self.classes)
        for label, (count, limit) in enumerate(zip(label_counts, most.tolist(), strict=True)):
            if count > limit:
                raise PayloadError(
                    "label_counts", f"{count} samples of class {label}, but the stream has brought this device {limit}"
                )
