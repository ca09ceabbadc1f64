"""The tables that describe how a run is played: its clock, its evaluation, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedemu.ops.experiment.tables.section import Count, Positive, Section
from fedemu.protocol.messages import LONGEST_BEAT, SHORTEST_BEAT


class Clock(Section):
    """The clock of the experiment: virtual time that jumps from event to event, or real time."""

    kind: Literal["virtual", "wall"] = "virtual"


class Evaluate(Section):
    """Every ``every``-th round is evaluated. So are the last round of the run and the last one of each period.

    With ``samples`` above 0 a round is evaluated on this number of test samples, evenly spaced in the test set, and
    only for accuracy and loss. Every ``full_every``-th round, the last one, and the last one of each period are
    evaluated in full: on all test samples, by class and by period. With ``validation`` a full evaluation also tests
    the model on all devices' validation parts together.
    """

    every: Count = 1
    samples: Annotated[int, Field(ge=0)] = 0
    full_every: Count = 10
    validation: bool = False


class Diagnose(Section):
    """In every ``every``-th round the model of each selected device is tested before aggregation; 0 means never.

    ``samples`` is the number of test samples, evenly spaced in the test split; 0 means all of them.
    """

    every: Annotated[int, Field(ge=0)] = 0
    samples: Annotated[int, Field(ge=0)] = 0


class Liveness(Section):
    """When a peer counts as dead: after ``heartbeat_seconds × patience`` real seconds of silence.

    The whole fleet sends at most ``most_per_second`` signs of life. So the devices of a large one send them less often.
    Nobody sends more than one in ``SHORTEST_BEAT`` seconds.
    """

    heartbeat_seconds: Annotated[float, Field(gt=0, le=LONGEST_BEAT)] = 2.0
    patience: Count = 5
    most_per_second: Count = 500

    def interval(self, devices: int) -> float:
        """The real seconds between two signs of life of each of so many devices."""
        return max(self.heartbeat_seconds, devices / self.most_per_second, SHORTEST_BEAT)


class Server(Section):
    """The coordinator's own work with torch. The number of its threads changes the last bits of a result."""

    threads: Annotated[int, Field(ge=1, le=256)] = 1


class Compute(Section):
    """How numbers are computed. With ``portable`` a run has the same bits on all x86-64 processors with AVX2.

    It costs time, because no process uses larger instructions, oneDNN, or more than one thread.
    """

    portable: bool = False


class Limits(Section):
    """The largest reply that is accepted: in bytes of its tensors, and as the Euclidean norm over all of them."""

    max_payload_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    max_norm: Positive = 1e6
