"""What a LocalTerm and an Importance refuse when they are made."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from fedemu.algorithms.terms.local_term import Importance, LocalTerm
from fedemu.protocol.errors import ConfigurationError


def zero(*_: Any) -> Tensor:
    return Tensor([0.0])[0]


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"term": None}, "term of the LocalTerm 'mine' is a NoneType; it must be a function of the model and a Pass"),
        ({"previous": "no"}, "previous of the LocalTerm 'mine' is a str; it must be true or false"),
        ({"importance": 3}, "importance of the LocalTerm 'mine' is an int; it must be an Importance, or None"),
        ({"notes": ["a"]}, "notes of the LocalTerm 'mine' is a list; it must be a dict of shapes by name"),
        (
            {"notes": {"a": 3}},
            "notes['a'] of the LocalTerm 'mine' is an int; it must be a shape by a name, as {'y': (10,)}",
        ),
        (
            {"notes": {"a": ("b",)}},
            "notes['a'] of the LocalTerm 'mine' is a tuple; it must be a shape by a name, as {'y': (10,)}",
        ),
        ({"otherwise": 3}, "otherwise of the LocalTerm 'mine' is an int; it must be a text"),
    ],
)
def test_a_local_term_of_wrong_parts_is_refused_by_its_name(parts: dict[str, Any], sentence: str) -> None:
    LocalTerm(name="mine", term=zero, notes={"logits": (10,), "loss": ()})
    with pytest.raises(ConfigurationError) as caught:
        LocalTerm(**{"name": "mine", "term": zero, **parts})
    assert str(caught.value) == sentence


@pytest.mark.parametrize("name", ["previous", "samples", 3])
def test_a_term_has_no_name_under_which_something_else_is_kept(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"a LocalTerm can't have the name {name!r}; give it a text other"):
        LocalTerm(name, zero)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"value": None}, "value of an Importance is a NoneType; it must be a function"),
        ({"strength": 2}, "strength of an Importance is an int; it must be a function"),
        ({"decay": "1"}, "decay of an Importance is a str; it must be a number"),
        ({"samples": 0}, "an Importance can't take 0 samples of a device; it must be a whole number above 0"),
        ({"samples": 2.5}, "an Importance can't take 2.5 samples of a device; it must be a whole number above 0"),
    ],
)
def test_an_importance_of_wrong_parts_is_refused(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Importance(**{"value": zero, "strength": zero, "samples": 1, "decay": 1.0, **parts})
    assert str(caught.value) == sentence
