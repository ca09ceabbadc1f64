"""``data.json``: what the data of a run say of its model, so that the model can be used elsewhere, and classes named.

``docs/run_directory.md`` is the contract. No torch is imported here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from fedemu.algorithms.data.corpus import Corpus

DATA: Final = "data.json"


def about(corpus: Corpus) -> dict[str, Any]:
    """What the file holds: the form of a sample, its normalisation, and the names of classes, or of tokens."""
    told = {
        "input_shape": corpus.input_shape,
        "mean": corpus.mean,
        "std": corpus.std,
        "class_names": corpus.class_names,
    }
    return told | ({"vocabulary": corpus.vocabulary} if corpus.language else {})


def read_class_names(directory: Path) -> tuple[str, ...]:
    """The names of the classes by number. Empty if the run has no such file, or if it can't be read."""
    try:
        return tuple(map(str, json.loads((directory / DATA).read_bytes())["class_names"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
