import hashlib
import struct

import pytest
import torch

from fedemu.coordinator.summary import TOTALS, machine, model_digest, summarize, versions

FACTS = {"name": "digits", "outcome": "completed", "seed": 3, "model_digest": "00"}


def test_a_summary_adds_up_rows_and_finds_the_best():
    rows = [
        {"round": 1, "accuracy": 0.5, "class_accuracy": [0.5, 0.5], "selected": 3, "late": 1, "bytes_up": 10},
        {"round": 2, "accuracy": None, "selected": 3, "late": 0, "bytes_up": 10},
        {"round": 3, "accuracy": 0.75, "class_accuracy": [1.0, 0.5], "selected": 4, "bytes_up": 5},
        {"round": 4, "accuracy": 0.25, "class_accuracy": [0.5, None], "virtual_time": 60.0, "wall_time": 1.5},
    ]
    summary = summarize(rows, **FACTS)
    assert (summary.rounds, summary.final_accuracy, summary.best_accuracy) == (4, 0.25, 0.75)
    assert summary.forgetting == 0.5
    assert {key: summary.totals[key] for key in ("selected", "late", "bytes_up")} == {
        "selected": 10,
        "late": 1,
        "bytes_up": 25,
    }
    assert set(summary.totals) == set(TOTALS)
    assert (summary.virtual_time, summary.wall_time) == (60.0, 1.5)


def test_a_summary_of_no_rounds_knows_nothing():
    summary = summarize([], **FACTS, virtual_time=5.0)
    assert (summary.rounds, summary.final_accuracy, summary.best_accuracy, summary.forgetting) == (0, None, None, None)
    assert (summary.virtual_time, summary.wall_time) == (5.0, 0.0)


def test_versions_and_machine_are_told():
    assert versions()["torch"] == torch.__version__
    assert machine()["cores"] >= 1
    assert machine()["memory_bytes"] > 2**20


def test_the_model_digest_is_over_sorted_names_dtypes_shapes_and_bytes():
    variables = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(7)}
    expected = hashlib.sha256(
        b'["b","int64",[]]\n' + struct.pack("<q", 7) + b'["w","float32",[1,2]]\n' + struct.pack("<2f", 1.0, 2.0)
    )
    assert model_digest(variables) == expected.hexdigest()
    assert model_digest(dict(reversed(variables.items()))) == expected.hexdigest()


def test_the_model_digest_does_not_see_memory_layout_or_gradients():
    weight = torch.arange(24.0).reshape(1, 2, 3, 4)
    strided = weight.clone(memory_format=torch.channels_last).requires_grad_()
    assert model_digest({"w": strided}) == model_digest({"w": weight})


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {},
    ],
)
def test_the_model_digest_sees_names_shapes_dtypes_and_every_bit(other):
    assert model_digest(other) != model_digest({"w": torch.zeros(4)})


def test_bfloat16_has_a_digest_of_its_own_bits():
    value = torch.tensor([1.0], dtype=torch.bfloat16)
    expected = hashlib.sha256(b'["w","bfloat16",[1]]\n' + b"\x80\x3f").hexdigest()
    assert model_digest({"w": value}) == expected
    assert model_digest({"w": value.reshape(())}) != expected
