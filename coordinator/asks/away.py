"""Which devices have been without a connection for as long as one that was given up for that.

They are as lost as that one, whether they were asked or not. Otherwise each of the next asks would wait anew for some
devices of a machine that is gone for good.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedemu.coordinator.fleet.columns import Mask
from fedemu.protocol.ids import DeviceId


class Away:
    """Since when each device has had no connection, as far as one ask sees it. Those that are ``here`` have one."""

    def __init__(self, here: Mask) -> None:
        self._since: NDArray[np.float64] = np.where(here, np.inf, -np.inf)

    def came(self, device: DeviceId) -> None:
        """The device is connected."""
        self._since[device] = np.inf

    def left(self, device: DeviceId, now: float) -> None:
        """The device is no longer connected."""
        self._since[device] = now

    def as_long(self, given_up: Iterable[DeviceId], here: Mask) -> Mask:
        """The devices that are not ``here`` now, and have been away for as long as one of those ``given_up``."""
        since = self._since[list(given_up)]
        away = since[since < np.inf]
        return (self._since <= away.max()) & ~here if len(away) else np.zeros_like(here)
