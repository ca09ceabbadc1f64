"""The parts of one ask: what devices are given, what may come back, and what is accepted of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedemu.algorithms.interface import DeviceReply
from fedemu.coordinator.asks.holdings import Holdings
from fedemu.coordinator.asks.payload import Payload, PayloadTemplate
from fedemu.protocol.codec import Buffer
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import BlobRef, TensorSpec, Work

Part = tuple[tuple[TensorSpec, ...], Sequence[Buffer]]
"""The tensors that one device gets and no other, as specs and frames."""


@dataclass(frozen=True)
class AskParts:
    """The parts of one ask: what all devices are given, what a single device is given, and what may come back."""

    ask: AskId
    program: str
    task: int
    start: float
    deadline: float
    durable_round: int
    epoch: int
    shared: tuple[BlobRef, ...]
    by_device: Mapping[DeviceId, Part]
    passes: float
    processed: float
    template: PayloadTemplate
    keeps_state: bool
    label_counts: int | None
    """The number of label counts that a reply declares, None if it declares none."""
    max_norm: float
    spill: Path | None
    """The folder of replies that are kept until the ask ends. None if each is only added to a sum, soon."""
    holdings: Holdings | None = None
    """What the devices' streams have brought them. None if that is not known, so that nothing is checked."""
    measured: frozenset[str] = frozenset()
    """The keys of shared trees and of the payload that cost no emulated traffic (``Measuring``)."""

    @cached_property
    def charged(self) -> list[BlobRef]:
        """The shared trees whose download costs emulated traffic."""
        return [blob for blob in self.shared if blob.key not in self.measured]

    @cached_property
    def upload_bytes(self) -> int:
        """The emulated bytes of a reply."""
        return self.template.bytes_without(self.measured)

    def part_of(self, device: DeviceId) -> Part:
        """What this device gets and no other. Most asks give nothing to single devices."""
        return self.by_device.get(device, ((), ()))

    def work(self, device: DeviceId, state: AskId | None, download: int) -> Work:
        """What a device is told, without its frames. ``state`` is the version of its own state that counts.

        ``download`` are the bytes of the shared trees that it has to download.
        """
        specs, frames = self.part_of(device)
        return Work(
            ask=str(self.ask),
            program=self.program,
            task=self.task,
            start=self.start,
            shared=self.shared,
            state=None if state is None else str(state),
            download_bytes=download + sum(map(len, frames)),
            upload_bytes=self.upload_bytes,
            passes=self.passes,
            processed=self.processed,
            deadline=self.deadline,
            durable_round=self.durable_round,
            epoch=self.epoch,
            tensors=specs,
        )


@dataclass(frozen=True)
class Contribution:
    """One accepted reply. ``seconds`` is the real time that the device says it took. No algorithm sees it."""

    reply: DeviceReply
    payload: Payload | None
    """None if an edge has added it to its sum."""
    seconds: float | None
