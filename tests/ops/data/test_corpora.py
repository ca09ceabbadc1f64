"""The data of an experiment: decoded once, the same everywhere."""

import json
import subprocess
import sys

import pytest

from fedemu.ops.data import corpora
from fedemu.ops.data.source import DataSource
from fedemu.ops.experiment import Experiment

DIGITS_DIGEST = "d0d0d09b3a1215a3217414f961d7570e6a34c1bc165dac2eebb1cd900c1ffabe"


def experiment(**data):
    return Experiment.parse({"data": data})


@pytest.fixture
def digits(tmp_path_factory):
    return corpora.load_corpus(DataSource("digits"), cache=tmp_path_factory.getbasetemp() / "digits-cache")


def test_digits_have_one_digest_on_every_machine(digits):
    assert digits.digest == DIGITS_DIGEST


def test_digits_are_decoded_without_the_heavy_libraries(own_cache):
    code = (
        "import sys; from fedemu.ops.data import corpora; from fedemu.ops.experiment import Experiment;"
        "corpora.prepare(Experiment().to_bytes());"
        "print([name for name in ('torch', 'sklearn', 'datasets', 'pyarrow', 'flwr_datasets') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_preparing_stores_once_and_tells_the_digest_of_what_is_loaded(own_cache):
    wanted = experiment(dataset="digits")
    first = corpora.prepare(wanted.to_bytes())
    stored = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()}
    second = corpora.prepare(wanted.to_bytes())
    assert first == second == corpora.open_corpus(wanted).digest
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()} == stored


def test_several_processes_may_prepare_at_once(own_cache):
    code = """
import os
from fedemu.ops.data import corpora
from fedemu.ops.experiment import Experiment
begin, prepared = os.pipe(), os.pipe()
for _ in range(4):
    if os.fork() == 0:
        os.close(begin[1])
        os.read(begin[0], 1)  # until all are there
        os.write(prepared[1], corpora.prepare(Experiment().to_bytes()).encode() + b" ")
        os._exit(0)
os.close(begin[1])
os.close(prepared[1])
print(open(prepared[0]).read())
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    digests = run.stdout.split()
    assert digests == [DIGITS_DIGEST] * 4
    assert len(list((own_cache / "datasets").glob("digits-*/meta.json"))) == 1
    assert not list((own_cache / "datasets").glob("*partial*"))


def test_the_digest_covers_samples_labels_and_columns(own_data):
    base = (
        "dict(x=np.zeros((2, 1), np.uint8), y=[0, 1], test_x=np.zeros((1, 1), np.uint8), test_y=[0], "
        "columns={'who': [1, 2]})"
    )
    changes = [
        "",
        "{'x': np.ones((2, 1), np.uint8)}",
        "{'y': [1, 0]}",
        "{'columns': {'who': [1, 3]}}",
        "{'test_y': [1]}",
    ]
    digests = [
        own_data(f"return {base} | {change or '{}'}", f"variant{place}").digest for place, change in enumerate(changes)
    ]
    assert len(set(digests)) == len(changes)
    assert own_data(f"return {base}", "same_content").digest == digests[0]
    assert all(json.dumps(digest) and len(digest) == 64 for digest in digests)
