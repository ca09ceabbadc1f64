"""Which machines compute alike, and what those that do not are told."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.coordinator.fleet.likeness import MOST_WAYS, Likeness
from fedemu.protocol.messages import Compute


def compute(**facts: Any) -> Compute:
    usual = {"fedemu": "1", "torch": "2", "numpy": "3", "device": "cpu", "processor": "Intel", "instructions": "AVX512"}
    return Compute(**{**usual, **facts})


def on_gpu(**facts: Any) -> Compute:
    return compute(**{"device": "cuda", "gpus": ("H100",), "driver": "550", "cuda": "12.8", **facts})


def with_gpu(**facts: Any) -> Compute:
    """A coordinator's machine, whose server jobs use the GPU."""
    return on_gpu(**{"device": "cpu", **facts})


def test_the_first_machine_sets_the_way() -> None:
    likeness = Likeness()
    assert likeness.refusal(compute(), "a") == likeness.note(compute(), "a") == ""
    assert likeness.refusal(compute(), "b") == likeness.note(compute(), "b") == ""
    told = likeness.refusal(compute(instructions="AVX2", torch="2.1"), "b")
    assert told.startswith(
        "b would compute otherwise than a does in this run: torch 2.1 instead of 2, instructions AVX2 instead of AVX512"
    )
    assert "runtime.mixed_compute=true" in told
    assert [way.host for way in likeness.ways] == ["a"]
    assert not likeness.mixes


@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        (compute(), compute(processor="AMD"), "processor AMD instead of Intel"),
        (compute(), compute(fedemu="2"), "fedemu 2 instead of 1"),
        (compute(), compute(numpy=""), "numpy unknown instead of 3"),
        (compute(), on_gpu(driver="", cuda=""), "device cuda instead of cpu, gpus H100 instead of unknown"),
        (on_gpu(), on_gpu(gpus=("A100",)), "gpus A100 instead of H100"),
        (on_gpu(), on_gpu(driver="535"), "driver 535 instead of 550"),
        (on_gpu(), on_gpu(cuda="13.0"), "cuda 13.0 instead of 12.8"),
        (on_gpu(), on_gpu(processor="AMD", instructions="AVX2"), ""),
        (on_gpu(), on_gpu(gpus=("A100", "H100")), "its GPUs are of several models (A100, H100)"),
        (on_gpu(), None, ""),
        (with_gpu(), with_gpu(gpus=("A100",)), "gpus A100 instead of H100"),
        (with_gpu(), with_gpu(processor="AMD"), "processor AMD instead of Intel"),
        (
            with_gpu(),
            compute(),
            "gpus unknown instead of H100, cuda unknown instead of 12.8, driver unknown instead of 550",
        ),
    ],
)
def test_what_differs_is_named(first: Compute, other: Compute | None, difference: str) -> None:
    likeness = Likeness()
    likeness.note(first, "a")
    assert bool(likeness.refusal(other, "b")) == bool(difference)
    assert difference in likeness.refusal(other, "b")
    assert likeness.note(other, "b") == difference


def test_gpus_of_several_models_in_one_machine_compute_differently() -> None:
    likeness = Likeness()
    assert "its GPUs are of several models (A100, H100)" in likeness.refusal(on_gpu(gpus=("A100", "H100")), "a")
    likeness.note(on_gpu(gpus=("A100", "H100")), "a")
    assert likeness.mixes
    assert Likeness().refusal(with_gpu(gpus=("A100", "H100")), "a") == "", "server jobs use one of them"


def test_a_portable_run_compares_versions_alone() -> None:
    likeness = Likeness(portable=True)
    likeness.note(compute(), "a")
    assert likeness.refusal(on_gpu(processor="AMD", instructions="AVX2", gpus=("A", "B")), "b") == ""
    assert "torch 9 instead of 2" in likeness.refusal(compute(torch="9"), "c")
    likeness.note(on_gpu(torch="9"), "c")
    assert [way.compute for way in likeness.ways] == [compute(), compute(torch="9")], "no GPU has a part in the run"


def test_several_ways_are_kept_where_they_are_allowed_and_survive_a_checkpoint() -> None:
    likeness = Likeness(mixed=True)
    likeness.note(on_gpu(), "a")
    assert likeness.refusal(compute(), "b") == ""
    for host in ("b", "c"):
        assert (
            likeness.note(compute(), host) == "device cpu instead of cuda, gpus unknown instead of H100, "
            "cuda unknown instead of 12.8, driver unknown instead of 550"
        )
    assert likeness.mixes
    again = Likeness()
    again.restore([{**entry, "a fact of a later version": "new"} for entry in likeness.to_record()])
    assert again.ways == likeness.ways
    assert [way.host for way in again.ways] == ["a", "b"]
    assert again.refusal(compute(), "b"), "a run that goes on without the setting is that of the first machine"


def test_a_machine_that_computes_otherwise_each_time_makes_no_checkpoint_grow_without_end() -> None:
    likeness = Likeness(mixed=True)
    differences = [likeness.note(compute(torch=str(version)), "a") for version in range(MOST_WAYS + 2)]
    assert len(likeness.ways) == MOST_WAYS
    assert all(differences[1:])
