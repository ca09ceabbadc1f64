"""Which private parts of torch are used: that they exist, and that one file alone names them.

This file imports no code of fedemu, so that its sentences come also where the import of that code fails.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FLOOR = Path(__file__).parents[4] / "device"
FILE = FLOOR / "compute" / "tapes" / "private_torch.py"
PYTREES = "import it from where torch keeps its pytrees now"
MODES = "import it from where torch keeps its dispatch modes now"
REFERENCES = "import it from where torch keeps its references to tensors now"
FASTER = "delete it from LOG_SOFTMAX; a slower way to the same operator is then taken"


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("torch.utils._pytree", "TreeSpec", PYTREES),
        ("torch.utils._pytree", "tree_flatten", PYTREES),
        ("torch.utils._pytree", "tree_unflatten", PYTREES),
        ("torch.utils._pytree", "tree_map_only", PYTREES),
        ("torch.utils._python_dispatch", "TorchDispatchMode", MODES),
        ("torch.multiprocessing.reductions", "StorageWeakRef", REFERENCES),
        ("torch.utils.weak", "WeakTensorKeyDictionary", REFERENCES),
        ("torch", "_log_softmax", FASTER),
        ("torch", "_log_softmax_backward_data", FASTER),
    ],
)
def test_every_private_name_exists(module: str, name: str, remedy: str) -> None:
    try:
        found = hasattr(importlib.import_module(module), name)
    except ImportError:
        found = False
    assert found, f"torch {torch.__version__} has no {module}.{name}. In {FILE.name}, {remedy}."


def private_names(path: Path) -> Iterator[str]:
    """The private parts of torch that a file names, and the private attributes of operators."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = ["torch._schema"] if node.attr == "_schema" else [ast.unparse(node)]
        private = re.compile(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*")
        yield from (f"{path.name}:{node.lineno} {name}" for name in names if private.fullmatch(name))  # type: ignore[attr-defined]


def test_one_file_alone_uses_private_parts_of_torch() -> None:
    others = [path for path in FLOOR.rglob("*.py") if path != FILE]
    assert len(others) > 20
    assert [name for path in others for name in private_names(path)] == [], f"Move these to {FILE.name}, with a test."
    assert len({*private_names(FILE)}) >= 10
