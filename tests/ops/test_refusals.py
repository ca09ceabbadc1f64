"""An experiment that can't be put together ends in one sentence before any device is started, and leaves nothing."""

from __future__ import annotations

import logging
import os
import socket
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.ops import cli_commands, launch, serve_embedded
from fedemu.ops.config import Experiment
from fedemu.ops.datasets import prepare
from fedemu.ops.logs import LogFile

IMPOSSIBLE = [
    ("algorithm.options.muu=1", "has no option algorithm.options.muu"),
    ("data.partition.min_samples=90", "20 devices with at least 90 samples each need 1800, but there are 1437"),
]
REFUSES = """
    from fedemu.algorithms.fedavg import FedAvg
    from fedemu.protocol.errors import ConfigurationError

    class Refuses(FedAvg):
        def __init__(self, ingredients):
            super().__init__(ingredients.local_sgd())

        def init(self, variables, context):
            raise ConfigurationError("this method wants more classes")
"""
OWN = """
    from torch import nn

    class Fewer(nn.Sequential):
        def __init__(self, input_shape, classes):
            super().__init__(nn.Flatten(), nn.Linear(64, classes - 1))

    def vector(logits, batch, facts):
        return logits.logsumexp(-1)
"""
UNFIT = [
    ("model.name", "Fewer", "model '{}' gives logits [2, 9] where the data have 10 classes; they must be [2, 10]"),
    (
        "algorithm.loss",
        "vector",
        "'fedavg' can't train the model 'mlp' by the loss '{}': the program failed: "
        "grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor, got tensor with 1 dims",
    ),
]
ALONE = {"coordinator": ("coordinator",), "memory": ("run", "--transport", "memory")}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("FEDEMU_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "refusals-cache"))
    prepare(Experiment().to_bytes())
    monkeypatch.chdir(tmp_path)
    root, threads = logging.getLogger(), torch.get_num_threads()
    level = root.level
    yield
    for handler in [handler for handler in root.handlers if isinstance(handler, LogFile)]:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)
    root.setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the processes that ``fedemu run`` starts."""
    names: list[str] = []
    start = launch._start

    def recorded(command: Sequence[str], *rest: Any) -> Any:
        names.append(next(word for word in command if word.startswith("fedemu-")))
        return start(command, *rest)

    monkeypatch.setattr(launch, "_start", recorded)
    return names


def refused(capture: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command said on stderr that has to end with code 2, in one sentence, and without a trace."""
    with pytest.raises(SystemExit) as ended:
        cli_commands.app([*arguments, "digits-small"], prog_name="fedemu")
    said, complained = capture.readouterr()
    assert (ended.value.code, said, complained.count("\n")) == (2, "", 1), complained
    assert complained.startswith("fedemu: ")
    assert list(Path().iterdir()) == []
    return complained


def test_run_starts_no_device(started: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    setting, said = IMPOSSIBLE[0]
    assert said in refused(capfd, "run", "--set", setting)
    assert started == ["fedemu-coordinator"]


@pytest.mark.parametrize("command", ALONE)
@pytest.mark.parametrize(("setting", "said"), IMPOSSIBLE)
def test_a_coordinator_by_itself_refuses_in_the_same_words(
    setting: str, said: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capfd, *ALONE[command], "--set", setting)


def test_a_method_may_refuse_as_late_as_in_its_first_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path_factory.mktemp("own") / "method.py"
    own.write_text(textwrap.dedent(REFUSES))
    embedded: list[object] = []
    monkeypatch.setattr(serve_embedded, "embed", embedded.append)
    said = refused(capfd, "run", "--transport", "memory", "--set", f"algorithm.name={own}:Refuses")
    assert said == "fedemu: this method wants more classes\n"
    assert embedded == []


@pytest.fixture(scope="module")
def unfit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.mktemp("own") / "unfit.py"
    own.write_text(textwrap.dedent(OWN))
    return own


@pytest.mark.parametrize("command", [*ALONE, "validate"])
@pytest.mark.parametrize(("key", "name", "said"), UNFIT)
def test_a_model_or_a_loss_that_does_not_fit_is_found_by_a_trial(
    key: str, name: str, said: str, command: str, unfit: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    own = f"{unfit}:{name}"
    words = ALONE.get(command, (command,))
    assert refused(capfd, *words, "--set", f"{key}={own}") == f"fedemu: {said.format(own)}\n"


def test_a_folder_that_was_asked_for_is_not_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    assert "'mlpp'" in refused(capfd, "coordinator", "--set", "model.name=mlpp", "--out", "here")


def test_an_address_in_use_is_found_before_devices_are_started(
    started: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused(capfd, "run", "--bind", address)
    assert started == ["fedemu-coordinator"]
