"""What several tests of data sets need."""

import sys

import pytest

from fedemu.ops.data import corpora
from fedemu.ops.experiment import Experiment


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache for this test, and no folder of data sets."""
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def own_data(tmp_path, monkeypatch, own_cache):
    """Writes a module whose function ``make`` has this body, and loads what it returns as a data set."""
    monkeypatch.chdir(tmp_path)

    def write(body, name="my_data"):
        (tmp_path / f"{name}.py").write_text(f"import numpy as np\ndef make():\n    {body}\n")
        sys.modules.pop(name, None)
        return corpora.open_corpus(Experiment.parse({"data": {"dataset": f"{name}:make", "id_column": "who"}}))

    return write
