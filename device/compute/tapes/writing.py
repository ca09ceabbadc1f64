"""Finds operations that write to tensors which somebody else reads, too."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from fedemu.algorithms.layouts import address
from fedemu.device.compute.tapes.private_torch import OperationWatcher, written_arguments
from fedemu.protocol.code.own_code import is_own, place
from fedemu.protocol.errors import FedemuError


def nothing_written(named: Iterable[tuple[str, Tensor]], error: Callable[[str], FedemuError]) -> OperationWatcher:
    """A context that raises if an operation writes to one of these tensors, or to a part of one.

    ``error`` makes the error from the name of the tensor, which the line of the user's own code in it follows.
    """
    outside = sum(1 for _ in traceback.walk_stack(sys._getframe()))
    names = {address(leaf): name for name, leaf in named if leaf.numel()}

    def seen(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for leaf in (*written_arguments(operator, args), kwargs.get("out")):
            if isinstance(leaf, Tensor) and (name := names.get(address(leaf))) is not None:
                own = [frame for frame in traceback.extract_stack()[outside:] if is_own(frame.filename)]
                raise error(f"{name} ({place(own[-1])})" if own else name)

    return OperationWatcher(seen)
