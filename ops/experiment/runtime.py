"""The settings of one machine. They are no part of an experiment, and never change what a run computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fedemu.ops.experiment.mistakes import plain_table, refuse
from fedemu.ops.experiment.tables.section import Positive, Section, Text
from fedemu.protocol.addresses import check_address
from fedemu.protocol.errors import ConfigurationError

S = TypeVar("S", bound=Section)

MOST_TRAINERS = 1024
"""The largest number of trainers on one machine."""
MOST_NODES = 100_000
"""The largest number of nodes, or machines, among which an engine divides the devices."""


def _several(value: Any) -> Any:
    """One name is a list of one."""
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _address(listening: bool) -> AfterValidator:
    """An address of the protocol, to listen at or to connect to."""

    def checked(address: str) -> str:
        try:
            check_address(address, listening)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return address

    return AfterValidator(checked)


class Track(Section):
    """Who else is told of a run while it goes on (``docs/tracking.md``).

    ``to`` are the names of trackers, or ``module:Name``. ``out`` is where they write, empty for the run directory.
    ``project`` is under what name they file the run. ``patience`` is the real time that they have after its end.
    """

    to: Annotated[tuple[Text, ...], BeforeValidator(_several), Field(max_length=16)] = ()
    out: Annotated[str, Field(max_length=4096)] = ""
    project: Text = "fedemu"
    patience: Annotated[float, Field(ge=0, le=86400)] = 60.0

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Track:
        """Check the table ``[track]``. Raises ConfigurationError with one sentence if a setting is wrong."""
        return _parsed(cls, table, "track")


class Runtime(Section):
    """How this machine takes part in a run. Each machine has settings of its own. A resumed run may have others.

    ``trainers = 0`` means one trainer per core, or per GPU. ``mixed_compute`` says whether a coordinator takes machines
    that compute differently, so that results depend on which machine does what. ``metrics_port = 0`` means no metrics.
    ``metrics_address`` is the address of this machine at which they are served. ``report`` says whether a run draws its
    plots and writes its page when it ends. ``keys`` is a folder of keys, ``server_key`` the coordinator's public key or
    its file; empty means that none is named. ``devices_per_key`` and ``connections_per_key`` are what one machine may
    take of a coordinator with keys, and ``messages_per_second`` is what one connection may send in the long run.
    ``allow_code`` are the modules and files that the experiment of a coordinator may name on this machine. ``on`` is
    the engine that places the devices of ``fedemu run`` elsewhere, empty for none, ``nodes`` on how many nodes (0:
    all), and ``shared_state`` a folder for their state that all nodes see, empty for one on each node. Devices wait
    ``connect_seconds`` for their first coordinator, and ``lost_seconds`` for one that is gone. A trainer is killed if,
    while it starts or has work, it uses no processor time for ``idle_seconds``, or finishes nothing for
    ``stuck_seconds``. So is the process of a server job. These four are in real seconds.
    """

    bind: Annotated[Text, _address(listening=True)] = "tcp://127.0.0.1:5577"
    connect: Annotated[Text, _address(listening=False)] = "tcp://127.0.0.1:5577"
    keys: Annotated[str, Field(max_length=4096)] = ""
    server_key: Annotated[str, Field(max_length=4096)] = ""
    insecure: bool = False
    devices_per_key: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    connections_per_key: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    messages_per_second: Annotated[float, Field(ge=1, le=1e9)] = 1000.0
    allow_code: tuple[Text, ...] = ()
    transport: Literal["zmq", "memory"] = "zmq"
    on: Annotated[str, Field(max_length=4096)] = ""
    nodes: Annotated[int, Field(ge=0, le=MOST_NODES)] = 0
    shared_state: Annotated[str, Field(max_length=4096)] = ""
    trainers: Annotated[int, Field(ge=0, le=MOST_TRAINERS)] = 0
    per_process: Annotated[int, Field(ge=1, le=100_000)] = 1
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    mixed_compute: bool = False
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    metrics_address: Text = "127.0.0.1"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    report: bool = True
    track: Track = Track()
    connect_seconds: Positive = 60.0
    lost_seconds: Positive = 120.0
    idle_seconds: Positive = 60.0
    stuck_seconds: Positive = 1800.0

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Runtime:
        """Check the table ``[runtime]``. Raises ConfigurationError with one sentence if a setting is wrong."""
        return _parsed(cls, table, "runtime")


def _parsed(kind: type[S], table: Mapping[str, Any], name: str) -> S:
    plain = plain_table(table, name)
    try:
        return kind.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        raise refuse(error, plain, kind, name) from None
