"""What is said of asks and payloads that are no tensors."""

from __future__ import annotations

import re
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedemu.coordinator.asks.tensors import told_payload
from fedemu.protocol.errors import ConfigurationError

ONE = torch.ones(1)


def program(payload: Any, passes: Any = 1) -> Any:
    return SimpleNamespace(payload=lambda shared: payload, passes=passes)


def test_a_payload_tells_names_shapes_and_types_and_may_have_no_values() -> None:
    payload = {"delta": {"w": torch.empty(3, device="meta")}}
    assert told_payload("second", program(payload), {}) is payload


def test_a_tree_that_a_program_reads_and_an_ask_lacks_is_told() -> None:
    reads = SimpleNamespace(payload=itemgetter("model"), passes=1)
    said = "asks for the program 'second', which reads shared['model'], but 'shared' of this Ask has only 'modle'"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        told_payload("second", reads, {"modle": {"w": ONE}})


@pytest.mark.parametrize(
    ("payload", "passes", "said"),
    [
        (None, 1, "payload of the program 'second' returned a NoneType; it must return trees by key, as {"),
        ({"delta": ONE}, 1, "payload of the program 'second' returned a dict; it must return trees by key, as {"),
        ({"delta": {"w": 3}}, 1, "returned 'delta/w', which is an int; it must be a tensor, as torch.as_tensor makes"),
        ({"delta": {"w": ONE * 1j}}, 1, "returned 'delta/w', which is a tensor of complex64, which cannot travel; use"),
        ({}, "two", "passes of the program 'second' is a str; it must be a number, which may be 0"),
    ],
)
def test_a_payload_that_no_reply_could_have_is_told(payload: Any, passes: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        told_payload("second", program(payload, passes), {})
