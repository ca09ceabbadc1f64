"""Random draws: the numbers that are drawn without numpy's generators are numpy's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedemu.protocol.seeds import NO_DEVICE, NO_ROUND, generator, uniforms

numbers = st.one_of(st.integers(0, 2**32 - 1), st.integers(2**32, 2**63 - 1))


@given(seed=numbers, round=numbers, device=numbers, purpose=st.text(max_size=9))
def test_uniforms_are_those_of_numpys_generator(seed: int, round: int, device: int, purpose: str) -> None:
    drawn = uniforms(6, seed, round=round, device=device, purpose=purpose)
    assert drawn == generator(seed, round=round, device=device, purpose=purpose).random(6).tolist()


def test_uniforms_are_the_same_for_ever() -> None:
    assert uniforms(2, 1, round=3, device=7, purpose="faults/0/0") == [0.8728061465845591, 0.6561650606326068]
    assert uniforms(1, 0, round=NO_ROUND, device=NO_DEVICE, purpose="") == [0.745356623611485]
