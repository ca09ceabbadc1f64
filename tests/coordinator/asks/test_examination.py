"""What a script gets to know of a reply, and replies whose numbers cannot be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.interface import DeviceReply
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.coordinator.asks.examination import Contribution, counted, examined
from fedemu.coordinator.asks.holdings import Holdings
from fedemu.coordinator.asks.parts import AskParts
from fedemu.coordinator.asks.payload import PayloadError, PayloadTemplate
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Result
from fedemu.protocol.sharing.edge_messages import Held

ASK, DEVICE = AskId(3, 0, 0), DeviceId(1)
ARRIVALS = Arrivals(
    offsets=np.array([0, 1, 4]),
    indices=np.array([0, 1, 2, 3]),
    periods=np.array([0, 0, 0, 1]),
    seconds=np.zeros(4),
    period_count=2,
)
HOLDINGS = Holdings(ARRIVALS, np.array([0, 0, 1, 1]), classes=3)


def parts(label_counts: int | None, holdings: Holdings | None = None, task: int = 0) -> AskParts:
    empty = PayloadTemplate({})
    return AskParts(
        ASK, "train", task, 0.0, 10.0, 0, 7, (), {}, 1.0, 0.0, empty, False, label_counts, 1e3, None, holdings
    )


def both(asked: AskParts, **said: Any) -> list[Contribution | PayloadError]:
    """A reply from the device itself, and one that an edge keeps."""
    numbers = {"ask": str(ASK), "examples": 3, "steps": 2, "metrics": {"loss": 0.5}, "seconds": 4.0, **said}
    return [examined(asked, DEVICE, Result(**numbers, tensors=()), []), counted(asked, DEVICE, Held(**numbers))]


@pytest.mark.parametrize(("asked", "known"), [(None, None), (3, (1, 2, 0))])
def test_a_script_knows_label_counts_only_if_its_program_declares_them(
    asked: int | None, known: tuple[int, ...] | None
) -> None:
    for found in both(parts(asked), label_counts=(1, 2, 0)):
        assert isinstance(found, Contribution)
        assert (found.reply, found.seconds) == (DeviceReply(DEVICE, 3, 2, {"loss": 0.5}, known), 4.0)


@pytest.mark.parametrize("counts", [None, (1, 2), (1, 1, 0), (3, 3, 0)])
def test_label_counts_that_do_not_fit_are_refused(counts: tuple[int, ...] | None) -> None:
    for found in both(parts(3), label_counts=counts):
        assert isinstance(found, PayloadError)
        assert (found.reason, str(found)) == ("label_counts", "3 label counts that add up to 3 were asked for")


def test_a_reply_is_held_against_what_the_stream_has_brought_the_device() -> None:
    for task, reasons in ((0, ["examples"] * 2), (1, [None] * 2)):
        found = both(parts(None, HOLDINGS, task))
        assert [getattr(each, "reason", None) for each in found] == reasons
    wrong = both(parts(3, HOLDINGS, 1), label_counts=(2, 1, 0))
    assert [getattr(each, "reason", None) for each in wrong] == ["label_counts"] * 2
