"""Options of TARGET and of LANDER for what both do alike: making samples."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.algorithms.incremental.data_free.maker import SynthesisSettings


@pytest.fixture
def making() -> tuple[dict[str, Any], SynthesisSettings]:
    """Options that are no defaults, and the settings that they mean."""
    alike: dict[str, Any] = {
        "cross_entropy": 0.6,
        "batch_statistics": 7.0,
        "divergence": 0.8,
        "statistics_momentum": 0.4,
        "student_steps": 3,
        "student_batch": 5,
        "student_lr": 0.2,
        "student_decay": 0.01,
        "warm_up": 2,
    }
    named = {"synthesis_rounds": 9, "synthesis_steps": 8, "generator_batch": 10, "student_temperature": 12.0}
    settings = SynthesisSettings(rounds=9, steps=8, batch_size=10, temperature=12.0, keep_all=False, **alike)
    return {**alike, **named}, settings
