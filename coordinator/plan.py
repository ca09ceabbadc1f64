"""Everything that a coordinator is given, as one frozen object. ``ops/assembly`` makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedemu.algorithms.interface import Algorithm, PublicData, Tree
from fedemu.coordinator.asks.holdings import Holdings
from fedemu.coordinator.evaluation.album import Album
from fedemu.coordinator.evaluation.diagnosis import Diagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.fleet.admission import Quotas
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.observer import RunObserver
from fedemu.coordinator.service.view import FleetView
from fedemu.coordinator.settings import Settings
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import Compute
from fedemu.protocol.transport.interface import Network


class Evaluates(Protocol):
    """Evaluates a model after a round of a period. ``evaluate.Evaluator`` is one."""

    chance: float | None
    """The share of the most frequent class among the test samples. None for language data."""
    periods: int
    """The number of periods with test sets. 1 if all test samples are one set."""

    def evaluate(self, variables: Tree, period: int | None = None, on_all: bool = True) -> Evaluation:
        """The results of the model with these variables. The test sets up to ``period`` count as seen.

        Without ``on_all`` a part of the test samples may do.
        """
        ...


async def _alone() -> None:
    """Return at once, because nothing else computes in this process."""


@dataclass(frozen=True)
class CoordinatorPlan:
    """The plan of one run. The fleet has to agree on ``experiment``, ``partition`` and ``data``.

    ``data`` is a digest of the data set, of which ``data_set`` is the digest, and of what is frozen in the model.
    ``frozen`` are the tensors of the model that are no variables. The final model has them beside its variables.
    ``directory`` has been claimed: it holds a ``config.toml``, and the rounds that the run has played before, if any.
    ``opened`` is called once with the address at which the coordinator listens, when everything has been put together
    and the wait for devices begins. ``holdings`` bound what devices may say of their samples, and ``quotas`` what a
    machine may take. ``shown`` is called once, on the event loop, with what tells at any time what the devices do.
    ``planned`` are the on-line times of devices that sleep until they are asked, None if devices live at once and
    announce theirs. ``compute`` is how this process computes, which is compared with how the run was computed before;
    None: nothing is known of it. ``executor`` computes the devices, as ``experiment`` tells them, and the record of the
    run keeps it. ``at_rest`` waits until nothing is computed in this process beside the coordinator,
    such as the training of devices that live in it. ``about`` is what ``data.json`` tells of the data.
    """

    address: str
    network: Network
    settings: Settings
    algorithm: Algorithm[Any]
    variables: Tree
    evaluator: Evaluates
    experiment: bytes
    partition: bytes
    data: Digest
    data_set: Digest
    classes: int
    directory: Path
    frozen: Tree = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    public: PublicData | None = None
    diagnosis: Diagnosis | None = None
    album: Album | None = None
    holdings: Holdings | None = None
    planned: PlannedTimes | None = None
    quotas: Quotas = field(default_factory=Quotas)
    compute: Compute | None = None
    executor: str = ""
    observers: Sequence[RunObserver] = ()
    opened: Callable[[str], None] = lambda address: None
    shown: Callable[[FleetView], None] = lambda view: None
    at_rest: Callable[[], Awaitable[None]] = _alone
