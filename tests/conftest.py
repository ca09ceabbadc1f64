"""What holds for all tests: those with the mark ``gpu`` are skipped where torch finds no NVIDIA GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, where `make gpu` runs it"))
