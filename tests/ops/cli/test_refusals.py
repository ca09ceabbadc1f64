"""An experiment that can't be put together ends in one sentence before any device is started, and leaves nothing."""

from __future__ import annotations

import resource
import socket
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.coordinator.service import open_files
from fedemu.device.host import limits
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.cli import commands
from fedemu.ops.data.corpora import open_corpus, prepare
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.running import coordinator, embedded, launch
from fedemu.ops.running.together import require_room_here
from fedemu.protocol.errors import ConfigurationError

IMPOSSIBLE = [
    ("algorithm.options.muu=1", "has no option algorithm.options.muu"),
    ("data.partition.min_samples=90", "20 devices with at least 90 samples each need 1800, but there are 1437"),
]
REFUSES = """
    from fedemu.algorithms.methods.fedavg import FedAvg
    from fedemu.protocol.errors import ConfigurationError

    class Refuses(FedAvg):
        def __init__(self, ingredients):
            super().__init__(ingredients.local_sgd())

        def init(self, variables, context):
            raise ConfigurationError("this method wants more classes")
"""
OWN = """
    from torch import nn

    from fedemu.algorithms.models.feed_forward import mlp

    class Fewer(nn.Sequential):
        def __init__(self, input_shape, classes):
            super().__init__(nn.Flatten(), nn.Linear(64, classes - 1))

    def vector(logits, batch, facts):
        return logits.logsumexp(-1)

    class Plain(nn.Module):
        def __init__(self, input_shape, classes, inputs=64):
            super().__init__()
            self.body, self.top = nn.Linear(inputs, 6), nn.Linear(6, classes)

        def forward(self, x):
            features = self.body(x.flatten(1)).relu()
            return self.top(features), features

    class Reticent:
        def __init__(self, input_shape, classes):
            inner = mlp(input_shape, classes)
            self.kind, self.buffers, self.init, self.apply = inner.kind, inner.buffers, inner.init, inner.apply
"""
TASKS = "stream={kind='classes',tasks=5}"
REMEMBERING = ("mfcl", "fedavg_gen", "fedprox_plus", "fedlwf_2t", "fedcil", "target", "lander")
UNFIT_FOR_TASKS = [
    (["stream={kind='classes',tasks=11}"], "stream.tasks = 11, but 10 classes make at least 1 task and at most 10"),
    (["stream={kind='classes',order=[0,1,2,3,4,5,6,7,9]}"], "the class order misses: 8; stream.order must name each"),
    (["stream={kind='classes',order=[0,0]}"], "stream.order names class 0 more than once"),
    *(
        (
            [f"algorithm.name={name}"],
            f"the method '{name}' remembers classes of earlier tasks, but the stream brings none",
        )
        for name in REMEMBERING
    ),
    (
        ["algorithm.name=mfcl", "stream={kind='drift',periods=2}"],
        "but the stream brings none; set stream.kind = 'classes'",
    ),
    (["algorithm.loss=new_classes"], "about the classes of the current task, but the stream brings none"),
    (["algorithm.loss=task_temperature"], "'task_temperature' is about the classes of the current task"),
    (["algorithm.loss=new_classes", "algorithm.name=mfcl", TASKS], "the method 'mfcl' has a loss of its own"),
    (["algorithm.name=mfcl", TASKS, "model.name={own}:Plain"], "this model has no layers that report any"),
    (["algorithm.name=fedavg_gen", TASKS, "model.name={own}:Reticent"], "and a Reticent reports none; choose mlp"),
    (["algorithm.name=fedcil", TASKS, "model={{name='{own}:Plain',inputs=49}}"], "to samples of the shape (1, 8, 8)"),
    (["model.hidden=[4294967295]", TASKS], "the model 'mlp' does not fit into this machine's memory"),
    *(
        ([f"algorithm.name={name}", TASKS, f"algorithm.options.{option}"], said)
        for name, option, said in (
            ("mfcl", "noise=9", "stand for the 10 classes, but there are 9; set algorithm.options.noise = 10 or more"),
            ("mfcl", "iterations=0", "algorithm.options.iterations = 0 does not fit 'mfcl'"),
            ("mfcl", "samples=-1", "algorithm.options.samples = -1 does not fit 'mfcl'"),
            ("mfcl", "samples=10000000", "samples = 10000000 of each class come to 23.8 GiB, and more than 4 GiB"),
            ("mfcl", "noise=3000000", "algorithm.options.noise = 3000000 does not fit 'mfcl'"),
            ("mfcl", "diversity=1e300", "algorithm.options.diversity = 1e+300 does not fit 'mfcl'"),
            ("mfcl", "temperature=0.0", "algorithm.options.temperature = 0.0 does not fit 'mfcl'"),
            ("fedcil", "noise=3000000", "algorithm.options.noise = 3000000 does not fit 'fedcil'"),
            ("mfcl", "generator_batch=1", "algorithm.options.generator_batch = 1 does not fit 'mfcl'"),
            ("fedavg_gen", "split=false", "'fedavg_gen' has no option algorithm.options.split"),
            ("fedcil", "server_samples=0", "algorithm.options.server_samples = 0 does not fit 'fedcil'"),
            ("fedprox_plus", "mu=-1", "algorithm.options.mu = -1 does not fit 'fedprox_plus'"),
            ("target", "warm_up=32", "algorithm.options.warm_up = 32 leaves no round of 32 in which the student is"),
            ("lander", "anchors=words", "algorithm.options.anchors = 'words' is not 'orthonormal'"),
            ("fedlwf_2t", "alpha=0.8", "algorithm.options.alpha + beta = 1.13 leaves less than nothing"),
        )
    ),
]
UNFIT = [
    ("model.name", "Fewer", "model '{}' gives logits [2, 9] where the data have 10 classes; they must be [2, 10]"),
    (
        "algorithm.loss",
        "vector",
        "'fedavg' can't train the model 'mlp' by the loss '{}': the program failed: "
        "the loss gave a tensor of the shape [10]; it must give a tensor without dimensions, such as the mean over the "
        "batch",
    ),
]
ALONE = {"coordinator": ("coordinator",), "memory": ("run", "--transport", "memory")}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "refusals-cache"))
    prepare(Experiment().to_bytes())
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
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
    monkeypatch.setattr(launch._Children, "call_devices", lambda children: names.append("devices called"))
    return names


def refused(capture: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused: with code 2, one sentence on stderr, and nothing left behind.

    Indented lines about somebody's own code may follow the sentence. Returns the sentence.
    """
    with pytest.raises(SystemExit) as ended:
        commands.command([*arguments, "digits-small"], prog_name="fedemu")
    said, complained = capture.readouterr()
    sentence, *frames = complained.splitlines()
    assert (ended.value.code, said) == (2, ""), complained
    assert sentence.startswith("fedemu: ")
    assert all(frame.startswith("    ") for frame in frames)
    assert list(Path().iterdir()) == []
    return f"{sentence}\n"


@pytest.mark.parametrize("seeds", [[], ["--seeds", "0,1"]])
def test_a_machine_without_room_for_the_devices_is_found_before_anything_starts(
    seeds: list[str], monkeypatch: pytest.MonkeyPatch, started: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: 420 * 2**20)
    said = refused(capfd, "run", "--trainers", "1", *seeds)
    assert "20 devices and 1 trainer need about 0.5 GiB of memory, but 0.4 GiB are available" in said
    assert started == []


@pytest.mark.parametrize(
    ("settings", "machine"),
    [
        ({}, {"per_process": 20}),
        ({}, {"transport": "memory"}),
        ({}, {"on": "ray"}),
        ({"fleet": {"wake": "on-demand"}}, {}),
        ({"tree": {"edges": [2]}}, {}),
    ],
)
def test_devices_are_not_counted_here_if_they_share_processes_or_begin_elsewhere(
    settings: dict[str, Any], machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: 600 * 2**20)
    require_room_here(Experiment.parse(settings), Runtime(trainers=1, **machine))


@pytest.mark.parametrize(
    ("devices", "machine", "said"),
    [
        (20, {}, "the coordinator needs 276 open files"),
        (300, {}, "300 devices need 730 open files in one process"),
        (20, {"bind": "tcp://127.0.0.1:5577"}, "the coordinator needs 4096 open files"),
    ],
)
def test_of_what_coordinator_and_devices_need_the_larger_is_told(
    devices: int, machine: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    experiment = Experiment.parse({"fleet": {"devices": devices, "per_round": 5}})
    with pytest.raises(ConfigurationError, match=f"^{said}, but at most 100 are allowed"):
        require_room_here(experiment, Runtime(trainers=1, **machine))


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
    started_devices: list[object] = []
    monkeypatch.setattr(embedded, "embed", started_devices.append)
    said = refused(capfd, "run", "--transport", "memory", "--set", f"algorithm.name={own}:Refuses")
    assert said == "fedemu: this method wants more classes\n"
    assert started_devices == []


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


@pytest.mark.parametrize(("settings", "said"), UNFIT_FOR_TASKS)
def test_settings_that_do_not_go_with_classes_task_by_task_are_found_before_anything_starts(
    settings: list[str], said: str, unfit: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = [setting.format(own=unfit) if "{own}" in setting else setting for setting in settings]
    assert said in refused(capfd, "validate", *(word for setting in chosen for word in ("--set", setting)))


@pytest.mark.parametrize("name", ["mfcl", "fedavg_gen", "fedcil"])
def test_images_of_a_size_without_a_generator_are_refused(name: str) -> None:
    tasks = {"kind": "classes", "tasks": 5}
    experiment = Experiment.parse({"stream": tasks, "algorithm": {"name": name}})
    corpus = replace(open_corpus(Experiment()), input_shape=(1, 9, 9))
    with pytest.raises(ConfigurationError, match=r"no generator for samples of the shape \(1, 9, 9\); .* of 8, 28,"):
        open_algorithm(experiment, corpus)


def test_a_folder_that_was_asked_for_is_not_left_behind(capfd: pytest.CaptureFixture[str]) -> None:
    assert "'mlpp'" in refused(capfd, "coordinator", "--set", "model.name=mlpp", "--out", "here")


def test_a_refused_resume_with_more_rounds_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> object:
        with pytest.raises(SystemExit) as ended:
            commands.command([*words], prog_name="fedemu")
        return ended.value.code

    plain = ("--transport", "memory", "--set", "runtime.report=false")
    new = ("run", "digits-small", "--rounds", "1", *plain)
    written: list[str] = []
    with monkeypatch.context() as few:
        few.setattr(open_files, "most_open_files", lambda: 200)  # without sockets none are needed
        few.setattr(coordinator, "write_whole", lambda path, content: written.append(path.name))
        assert call(*new, "--out", "done") == 0
    assert written == [], "without sockets there is no address"
    names = ("config.toml", "summary.json", "model.safetensors", "metrics.jsonl")
    before = {name: Path("done", name).read_bytes() for name in names}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        capfd.readouterr()
        assert call("coordinator", "--resume", "done", "--rounds", "3", "--bind", address) == 2
        assert address in capfd.readouterr().err
    assert {name: Path("done", name).read_bytes() for name in names} == before
    assert call("run", "--resume", "done", "--rounds", "2", *plain) == 0
    assert len(Path("done/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.usefixtures("forks")
def test_an_address_in_use_is_found_before_devices_are_started(
    started: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused(capfd, "run", "--bind", address)
    assert started == ["fedemu-coordinator", "fedemu-devices"], "the devices were never called"
