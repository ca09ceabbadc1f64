"""torch's compiler, which a process that only differentiates need not import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let ``torch.func.grad`` run without importing torch's compiler.

    ``torch.func.grad`` imports ``torch._dynamo`` only to switch compiled autograd off, which takes two seconds and
    80 MB. Any other use of ``torch._dynamo`` inside this context gets the real module.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = _CompilerStandIn()
    torch.__dict__["_dynamo"] = stand_in
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stand_in:
            del torch.__dict__["_dynamo"]


class _CompilerStandIn:
    compiled_autograd = SimpleNamespace(_disable=nullcontext)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)
