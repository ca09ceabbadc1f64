"""The tables that say how a run is played: its clock, its evaluation, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedemu.ops.experiment.tables.section import Count, Positive, Section


class Clock(Section):
    kind: Literal["virtual", "wall"] = "virtual"


class Evaluate(Section):
    """Every so many rounds; the last round of the run and of each period of the stream is always evaluated."""

    every: Count = 1


class Diagnose(Section):
    """Every so many rounds each selected device's model is tested before aggregation; 0 is never.

    ``samples`` of the test split are used, evenly spaced; 0 is all of them.
    """

    every: Annotated[int, Field(ge=0)] = 0
    samples: Annotated[int, Field(ge=0)] = 0


class Liveness(Section):
    """Real seconds; a peer that was silent for ``heartbeat_seconds × patience`` is dead."""

    heartbeat_seconds: Positive = 2.0
    patience: Count = 5


class Server(Section):
    """Threads of the coordinator's own torch work; their number changes the last bits."""

    threads: Annotated[int, Field(ge=1, le=256)] = 1


class Limits(Section):
    """What a reply may be at most: bytes of its tensors, and the Euclidean norm over all of them."""

    max_payload_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    max_norm: Positive = 1e6
