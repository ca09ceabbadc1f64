"""``docs/protocol.md`` says what the code does."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest
from msgspec.structs import FieldInfo, fields

from fedemu.coordinator.fleet.admission import (
    REPEATS,
    SPARE_BYTES,
    SPARE_RATE,
    STRANGERS_BURST,
    STRANGERS_BYTES,
    STRANGERS_RATE,
    STRANGERS_UNIT,
    Admission,
    Quotas,
)
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.settings import Settings
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import ITEM_BYTES, UP, Limits, encode
from fedemu.protocol.errors import MalformedMessage, RefusedError
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.sharing.hub import FRAMES_OF_A_MESSAGE
from fedemu.protocol.transport.interface import Bounds
from fedemu.protocol.transport.sockets import _HANDSHAKE_MS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "protocol.md").read_text()
MESSAGES: dict[str, type[wire.Message]] = {
    str(kind.__struct_config__.tag): kind for kind in (*typing.get_args(wire.Up), *typing.get_args(wire.Down))
}
FROM_COORDINATOR = PAGE.index("## Messages from the coordinator")


def rows(section: str) -> dict[str, str]:
    """The second cell of each row of the tables, by the first cell without its marks."""
    return dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))


def section(heading: str) -> str:
    """The text from a heading to the next."""
    [text] = re.findall(rf"^##+ {heading}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert isinstance(text, str)
    return text


def has_default(field: FieldInfo) -> bool:
    return not field.required


def test_the_page_names_every_reason_for_which_a_hello_is_refused() -> None:
    settings = Settings(run="run", seed=1, rounds=1, devices=3, per_round=1)
    roster = Roster(settings, admission=Admission(3, Quotas(connections=2)))
    lease = roster.enroll(b"machine", 3, None, "", 0.0, "key").token
    roster.hello(b"device 0", wire.Hello(device=0, incarnation=1, lease=lease), 0.0, "key")
    reasons = set()
    for device, token in ((1, "no lease"), (0, lease), (1, lease)):
        with pytest.raises(RefusedError) as refused:
            roster.hello(b"another", wire.Hello(device=device, incarnation=1, lease=token), 0.0, "key")
        reasons.add(refused.value.reason)
    [named] = re.findall(r"^Answer: `welcome`, or `refused` \((.*?)\)", section("hello"), re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", named)) == reasons


def test_the_bytes_of_the_example_are_the_message_that_it_is_said_to_be() -> None:
    [example] = re.findall(r"is this one frame:\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    words = [word for line in example.splitlines() for word in re.split(r"\s{3,}", line.strip())[0].split()]
    frame = bytes.fromhex("".join(words))
    assert UP.decode([frame]).message == wire.Scheduled(ask="1.0.0", event="finish", at=12.5)
    assert msgpack.unpackb(frame)["t"] == "scheduled"


def test_the_largest_whole_numbers_are_those_that_are_read() -> None:
    [small, large] = [int(number.replace(",", "")) for number in re.findall(r"([\d,]{13,}) at most", PAGE)]
    for incarnation, examples, read in ((small, large, True), (small + 1, 0, False), (0, large + 1, False)):
        hello = wire.Hello(device=small, incarnation=incarnation, lease="")
        result = wire.Result(ask="1.0.0", examples=examples, steps=1, metrics={}, tensors=())
        assert (is_read(hello) and is_read(result)) == read


def is_read(message: wire.Message) -> bool:
    try:
        return UP.decode(encode(message)).message == message
    except MalformedMessage:
        return False


def test_every_message_is_described_under_its_sender() -> None:
    headings = re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(MESSAGES)
    for tag, kind in MESSAGES.items():
        described_below = PAGE.index(f"\n### {tag}\n") > FROM_COORDINATOR
        assert described_below == (kind in typing.get_args(wire.Down)), tag


@pytest.mark.parametrize("tag", MESSAGES)
def test_every_field_is_described_with_its_default(tag: str) -> None:
    described = rows(section(tag))
    declared = [field for field in fields(MESSAGES[tag]) if field.name != "v"]
    assert list(described) == [field.name for field in declared]
    for field in declared:
        assert ("default" in described[field.name]) == has_default(field), field.name


def test_the_messages_of_edges_are_on_their_page_with_their_fields() -> None:
    page = (DOCS / "edges.md").read_text()
    told = {tag: rest for tag, *rest in re.findall(r"^\| `(\w+)` \| (up|down) \| (.*) \|$", page, re.MULTILINE)}
    kinds = {str(kind.__struct_config__.tag): kind for kind in typing.get_args(edge.FromEdge | edge.ToEdge)}
    assert set(told) == set(kinds)
    of_a_result = {field.name for field in fields(wire.Result)} - {"tensors"}
    for tag, kind in kinds.items():
        direction, text = told[tag]
        assert (direction == "up") == (kind in typing.get_args(edge.FromEdge))
        declared = {field.name for field in fields(kind)} - {"v"}
        assert declared - (of_a_result if tag == "held" else set()) <= set(re.findall(r"`(\w+)`", text)), tag


def test_every_fact_of_how_a_machine_computes_is_described_with_its_default() -> None:
    described = rows(section("How a machine computes"))
    assert list(described) == [field.name for field in fields(wire.Compute)]
    for field in fields(wire.Compute):
        assert ("default" in described[field.name]) == has_default(field), field.name


def test_every_dtype_is_listed_with_its_size() -> None:
    cells = re.findall(r"\| `(\w+)` \| (\d) ", section("Tensors"))
    assert {name: int(size) for name, size in cells} == ITEM_BYTES


def test_every_choice_is_listed() -> None:
    for choice in (*typing.get_args(wire.Verdict), *typing.get_args(wire.DropCause)):
        assert f"`{choice}`" in PAGE
    [reasons] = re.findall(r"``reason`` is (.*?)\.", wire.Refused.__doc__ or "", re.DOTALL)
    assert set(rows(section("Refusals and reasons"))) >= set(re.split(r",\s+|\s+or\s+", reasons))


def test_the_limits_are_those_of_the_code() -> None:
    told = [float(value) for value in re.findall(r"\| (\d+) \|$", section("Limits"), re.MULTILINE)]
    limits = Limits()
    assert told == [
        limits.header_bytes, limits.frames, STRANGERS_BYTES, STRANGERS_BURST, STRANGERS_RATE,
        STRANGERS_UNIT, Quotas().messages_per_second, FRAMES_OF_A_MESSAGE, REPEATS, SPARE_BYTES, SPARE_RATE,
        Bounds.idle_seconds, _HANDSHAKE_MS / 1000,
    ]  # fmt: skip


def test_links_within_the_page_lead_somewhere() -> None:
    anchors = {heading.lower().replace(" ", "-") for heading in re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= anchors
