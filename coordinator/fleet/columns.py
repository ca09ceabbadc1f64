"""What the coordinator remembers of each device, in columns: a device that was never asked costs a few bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.ids import AskId, DeviceId, Digest
from fedemu.protocol.messages import BlobRef

Mask = NDArray[np.bool_]
"""A truth value for each device."""


class Columns:
    """One row for each of ``devices`` devices; what only devices have that were asked is kept beside the columns.

    ``incarnation`` is -1 before the first Hello. ``away`` is the time of the experiment until which a device stays away
    after a dropout. ``lost`` devices were given up, or away for as long as one that was: they are not asked again
    before their next Hello, so a machine that is gone for good delays a round or two, not all. ``states`` names the
    version of its own state that counts. ``charged`` are the blobs that it downloaded last, by shared key.
    """

    def __init__(self, devices: int) -> None:
        self.incarnation: NDArray[np.int32] = np.full(devices, -1, np.int32)
        self.away: NDArray[np.float64] = np.zeros(devices)
        self.lost: Mask = np.zeros(devices, bool)
        self.states: dict[DeviceId, AskId] = {}
        self.charged: dict[DeviceId, dict[str, Digest]] = {}
        self._begun: dict[DeviceId, AskId] = {}
        """The own states of the round's beginning, without those that were lost since."""

    def __len__(self) -> int:
        """The number of devices."""
        return len(self.away)

    def download_bytes(self, device: DeviceId, shared: Sequence[BlobRef]) -> int:
        """The bytes of these blobs that the device has to download, because it did not download them before."""
        charged = self.charged.get(device, {})
        return sum(blob.size for blob in shared if charged.get(blob.key) != blob.digest)

    def charge(self, device: DeviceId, shared: Iterable[BlobRef]) -> None:
        """Remember that the device has downloaded these blobs."""
        self.charged.setdefault(device, {}).update((blob.key, Digest(blob.digest)) for blob in shared)

    def begin_round(self) -> None:
        """A round begins, which may be tried again."""
        self._begun = dict(self.states)

    def begin_again(self) -> None:
        """The round is tried again, from the own states with which it began. What was lost meanwhile stays lost."""
        self.states = dict(self._begun)

    def forget_state(self, device: DeviceId) -> bool:
        """The own state of a device is gone, so that it begins anew. Returns whether it had one as the round began."""
        self.states.pop(device, None)
        return self._begun.pop(device, None) is not None

    def forget_states(self, first: int, stop: int) -> int:
        """The own states of devices [first, stop) are gone, so that they begin anew. Returns how many had one."""
        if stop - first < len(self.states):
            having = [device for device in map(DeviceId, range(first, stop)) if device in self.states]
        else:
            having = [device for device in self.states if first <= device < stop]
        for device in having:
            self.forget_state(device)
        return len(having)

    def to_record(self) -> dict[str, Any]:
        """What a checkpoint keeps, in the form of JSON: only rows that are not as at the beginning of a run.

        Each of ``states`` and ``charged`` lists the devices that have the same: there are few different values.
        """
        away = np.flatnonzero(self.away).tolist()
        states: dict[str, list[int]] = defaultdict(list)
        for device, state in self.states.items():
            states[str(state)].append(device)
        charged: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for device, blobs in self.charged.items():
            for key, digest in blobs.items():
                charged[key][digest].append(device)
        return {"away": [away, self.away[away].tolist()], "states": states, "charged": charged}

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore what ``to_record`` gave. Earlier versions listed every device."""
        if "digests" in record:
            self._restore_rows(record)
            return
        devices, away = record["away"]
        self.away[devices] = away
        self.states = {
            DeviceId(device): AskId.parse(state) for state, having in record["states"].items() for device in having
        }
        for key, by_digest in record["charged"].items():
            for digest, having in by_digest.items():
                for device in having:
                    self.charged.setdefault(DeviceId(device), {})[key] = Digest(digest)

    def _restore_rows(self, record: Mapping[str, Any]) -> None:
        digests = record["digests"]
        self.away[:] = record["away"]
        for index, (state, charged) in enumerate(zip(record["states"], record["charged"], strict=True)):
            if state is not None:
                self.states[DeviceId(index)] = AskId.parse(state)
            if charged:
                self.charged[DeviceId(index)] = {key: digests[place] for key, place in charged.items()}


def state_of(record: Mapping[str, Any], device: int) -> str | None:
    """The version of a device's own state that counts by the ``record`` of a checkpoint, None if it has none."""
    states = record.get("states") or {}
    if isinstance(states, list):
        return states[device] if device < len(states) else None
    return next((state for state, having in states.items() if device in having), None)
