"""The code that an experiment names: found without importing it, pinned by digests, refused where it is not allowed."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fedemu.device.compute.process import open_runner
from fedemu.device.machine.prepare import prepare_data
from fedemu.device.pipe import TrainerSetup
from fedemu.ops.assembly.named_code import changed_code, named_places, received, record, with_digests
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.data.own.given import find
from fedemu.ops.data.source import locate
from fedemu.ops.experiment import Experiment
from fedemu.ops.results.code_of_run import CODE_FILE, earlier_code, known_code
from fedemu.protocol.code import named
from fedemu.protocol.errors import ConfigurationError, DataError

NET = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
PREPARE = "fedemu.ops.assembly.agreement:prepare"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "named-code-cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(named, "_allowed", None)
    monkeypatch.setattr(named, "_digests", {})
    Path("net.py").write_text(NET)


def of(**tables: Any) -> Experiment:
    return Experiment.parse({"model": {"name": "net.py:net"}, **tables})


def test_every_setting_that_can_name_code_is_known() -> None:
    algorithm = {
        "name": "a.b:Method",
        "loss": "my_losses:loss",
        "terms": {"my/terms.py:term": {}, "ewc": {}},
        "options": {"anchors": "net:anchors", "plain": ["x:y", 3], "time": "12:30"},
    }
    experiment = of(data={"dataset": "sets/my_data.py:rings"}, algorithm=algorithm)
    assert named_places(experiment) == {
        "net.py": "model.name",
        "a.b": "algorithm.name",
        "my_losses": "algorithm.loss",
        "my/terms.py": "algorithm.terms",
        "sets/my_data.py": "data.dataset",
    }
    # In options a text of this form may mean anything, so it is pinned where it leads to a source.
    digest = sha256(NET.encode()).hexdigest()
    assert with_digests(experiment).code == {"net": digest, "net.py": digest}


def test_digests_travel_with_the_experiment_and_count_for_its_digest() -> None:
    plain, pinned = of(), with_digests(of())
    assert Experiment.from_bytes(pinned.to_bytes()) == pinned
    assert pinned.digest != plain.digest
    assert pinned.table() == plain.table()
    assert with_digests(Experiment()).to_bytes() == Experiment().to_bytes()
    with pytest.raises(ConfigurationError, match="code is no setting; it is filled"):
        Experiment.parse({"code": {"net.py": "ab" * 32}})


def test_a_process_that_starts_later_refuses_code_that_was_changed_since_the_run_was_started() -> None:
    content = with_digests(of()).to_bytes()
    assert received(content).code.keys() == {"net.py"}
    Path("net.py").write_text(NET.replace("64", "32"))
    with pytest.raises(ConfigurationError, match=r"net\.py is not what it was .* resume the run"):
        received(content)


def test_a_run_directory_keeps_the_digests_and_a_change_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    record(tmp_path, with_digests(of()).code, said.append)
    assert json.loads((tmp_path / CODE_FILE).read_text()) == {"net.py": sha256(NET.encode()).hexdigest()}
    record(tmp_path, with_digests(of()).code, said.append)
    assert said == []
    Path("net.py").write_text(f"{NET}\n")
    record(tmp_path, with_digests(of()).code, said.append)
    old, new = sha256(NET.encode()).hexdigest()[:12], sha256(f"{NET}\n".encode()).hexdigest()[:12]
    assert json.loads((tmp_path / CODE_FILE).read_text())["net.py"].startswith(new)
    Path("net.py").write_text(NET)  # as it was when the run began
    record(tmp_path, with_digests(of()).code, said.append)
    told = "net.py was changed since this run was last started (digest {}... then, {}... now)"
    assert [line.partition(";")[0] for line in said] == [told.format(old, new), told.format(new, old)]


def test_what_rounds_were_played_with_before_a_change_is_kept(tmp_path: Path) -> None:
    first, second, third = (sha256(f"{NET}{end}".encode()).hexdigest() for end in ("", "\n", "\n\n"))
    for text, rows, earlier in (
        (NET, "", {}),
        (f"{NET}\n", "", {}),  # no round was played before
        (f"{NET}\n", "{}\n", {}),
        (NET, "{}\n", {"net.py": [second]}),
        (f"{NET}\n\n", "{}\n", {"net.py": [second, first]}),
    ):
        Path("net.py").write_text(text)
        (tmp_path / "metrics.jsonl").write_text(rows)
        record(tmp_path, with_digests(of()).code, lambda line: None)
        assert earlier_code(tmp_path) == earlier
        assert changed_code(tmp_path, of()) == []
    assert known_code(tmp_path) == {"net.py": third}
    Path("net.py").write_text(NET)
    assert changed_code(tmp_path, of()) == ["net.py"]


@pytest.mark.parametrize("kept", ["{", "[" * 100_000, "[1]", '{"other.py": "00"}'])
@pytest.mark.usefixtures("uncollected")
def test_digests_take_the_place_of_damaged_ones_and_of_code_that_is_not_named_any_more(
    tmp_path: Path, kept: str
) -> None:
    (tmp_path / CODE_FILE).write_text(kept)
    record(tmp_path, with_digests(of()).code, pytest.fail)
    assert json.loads((tmp_path / CODE_FILE).read_text()) == {"net.py": sha256(NET.encode()).hexdigest()}


def test_an_experiment_without_code_leaves_no_file(tmp_path: Path) -> None:
    record(tmp_path, Experiment().code, pytest.fail)
    assert not (tmp_path / CODE_FILE).exists()


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"name": "os:system"}},
        {"model": {"name": "mlp", "hidden": [8]}, "algorithm": {"name": "subprocess:run", "options": {"shell": True}}},
        {"model": {"name": "mlp"}, "algorithm": {"loss": "builtins:exec"}},
        {"model": {"name": "mlp"}, "algorithm": {"terms": {"/tmp/theirs.py:term": {}}}},
        {"model": {"name": "mlp"}, "data": {"dataset": "os:getcwd"}},
        {"model": {"name": "mlp"}, "data": {"dataset": "fedemu.protocol.code.named:load"}},
    ],
)
def test_a_restricted_process_refuses_an_experiment_that_names_other_code(tables: dict[str, Any]) -> None:
    named.restrict([])
    experiment = of(**tables)
    [(place, setting)] = named_places(experiment).items()
    hostile = experiment.model_copy(update={"code": {place: "ab" * 32}})
    for content in (experiment.to_bytes(), hostile.to_bytes()):
        with pytest.raises(ConfigurationError) as caught:
            received(content)
        assert f"names code that does not come with fedemu: {place} ({setting}); " in str(caught.value)
        assert str(caught.value).endswith(f"start these devices with --allow-code {place}")


def test_an_option_that_names_code_is_refused_too() -> None:
    algorithm = {"name": "lander", "options": {"anchors": "net.py:net"}}
    pinned = with_digests(Experiment.parse({"algorithm": algorithm}))
    named.restrict([])
    with pytest.raises(ConfigurationError, match=r"net\.py \(an option\); .*--allow-code net\.py$"):
        received(pinned.to_bytes())


@pytest.mark.usefixtures("forks")
def test_the_process_that_prepares_the_data_runs_what_is_allowed_and_unchanged(tmp_path: Path) -> None:
    sent = tmp_path / "experiment"
    sent.write_bytes(with_digests(of()).to_bytes())
    data = open_corpus(Experiment()).digest

    def prepared(*allow_code: str) -> None:
        asyncio.run(prepare_data(PREPARE, sent, data, allow_code))

    with pytest.raises(DataError, match=r"^the coordinator's experiment names .*net\.py \(model\.name\); .*net\.py$"):
        prepared()
    prepared("net.py")
    Path("net.py").write_text(f"{NET}\n")
    with pytest.raises(DataError, match=r"net\.py is not the same here as at the coordinator: .* there; give both"):
        prepared("net.py")


def test_a_trainer_process_refuses_for_itself(tmp_path: Path) -> None:
    (tmp_path / "experiment").write_bytes(with_digests(of()).to_bytes())
    trainer = "fedemu.ops.assembly.trainer:open_trainer"
    setup = TrainerSetup(number=0, bus="", token="", trainer=trainer, experiment="experiment", device_type="cpu")
    with pytest.raises(ConfigurationError, match="the coordinator's experiment names code"):
        open_runner(setup)


def test_over_the_network_data_are_read_only_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("sets", "private"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rows.csv").write_text("a,label\n1,x\n")
    shared = tmp_path / "sets"
    private = ("../private/rows.csv", str(tmp_path / "private"), "private/rows.csv")
    assert [locate(name, shared).kind for name in private] == ["file", "folder", "file"]
    named.restrict([])
    assert (
        locate("rows.csv", shared).where == locate(str(shared / "rows.csv"), shared).where == str(shared / "rows.csv")
    )
    for name in private:
        with pytest.raises(DataError, match=r"devices read files and folders only in FEDEMU_DATA; set it"):
            locate(name, shared)
    with pytest.raises(DataError, match="only in FEDEMU_DATA"):
        locate("sets/rows.csv", None)


def test_the_name_of_an_object_leads_to_no_other_folder(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    (tmp_path / "private").mkdir()
    for name in ("object#../private", f"object#{tmp_path / 'private'}", "object#"):
        with pytest.raises(DataError, match="hand them over again"):
            find(name, tmp_path)
