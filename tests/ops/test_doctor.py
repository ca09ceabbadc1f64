"""What the doctor says of machines that lack something."""

import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.device.host import limits
from fedemu.ops import doctor
from fedemu.ops.doctor import Finding
from fedemu.ops.extras import EXTRAS

RUN = subprocess.run


@pytest.fixture(autouse=True)
def _torch_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing torch in another process takes seconds."""

    def runs(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, '["2.13.0", [], ""]\n', "")

    monkeypatch.setattr(doctor.subprocess, "run", runs)


def find(subject: str, environment: dict[str, str]) -> Finding:
    return next(finding for finding in doctor.examine(environment) if finding.subject == subject)


def test_every_subject_is_looked_at_once() -> None:
    subjects = [finding.subject for finding in doctor.examine({})]
    assert len(subjects) == len(set(subjects))
    assert {"python", "packages", "torch", "zeromq", "open files", "processes", "memory"} <= set(subjects)


@pytest.mark.parametrize(
    ("machine", "subject", "advice"),
    [
        (limits.MachineLimits(files_hard=256, threads=None, memory=None), "open files", "ulimit -Hn"),
        (limits.MachineLimits(files_hard=20_000, threads=100, memory=None), "processes", "--per-process"),
        (limits.MachineLimits(files_hard=20_000, threads=None, memory=2**28), "memory", "0.2 GiB available"),
    ],
)
def test_a_limit_that_is_too_low_is_bad_and_comes_with_advice(
    machine: limits.MachineLimits, subject: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "this_machine", lambda: machine)
    finding = find(subject, {})
    assert finding.verdict == "bad"
    assert advice in finding.detail


@pytest.mark.parametrize(("version", "verdict"), [((3, 10, 13), "bad"), ((3, 11, 0), "ok"), ((4, 0, 1), "bad")])
def test_the_python_must_be_one_that_the_package_admits(
    version: tuple[int, int, int], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", version)
    finding = find("python", {})
    assert finding.verdict == verdict
    assert finding.detail.startswith(".".join(map(str, version)))
    assert ("must be" in finding.detail) == (verdict == "bad")


def test_what_the_system_does_not_tell_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        limits, "this_machine", lambda: limits.MachineLimits(files_hard=20_000, threads=None, memory=None)
    )
    assert find("memory", {}).verdict == "note"


def test_a_data_folder_that_is_not_there_is_bad(tmp_path: Path) -> None:
    assert find("data folder", {"FEDEMU_DATA": str(tmp_path / "absent")}).verdict == "bad"
    (tmp_path / "mnist").mkdir()
    assert find("data folder", {"FEDEMU_DATA": str(tmp_path)}) == Finding("ok", "data folder", f"{tmp_path}: mnist")


def test_a_folder_at_which_the_system_refuses_to_look_is_one_of_the_findings(tmp_path: Path) -> None:
    place = str(tmp_path / ("n" * 300))
    found = doctor.examine({"FEDEMU_DATA": place, "FEDEMU_CACHE": place})
    refused = {finding.subject for finding in found if "File name too long" in finding.detail}
    assert refused == {"data folder", "data cache"}


def test_a_machine_without_a_place_for_temporary_files_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setenv("TMPDIR", "/nowhere")
    found = find("temporary files", {})
    assert (found.verdict, "set TMPDIR" in found.detail) == ("bad", True)


def test_the_home_folder_of_a_user_who_is_not_there_is_one_of_the_findings() -> None:
    place = "~nobody-here/data"
    bad = [finding for finding in doctor.examine({"FEDEMU_DATA": place, "FEDEMU_CACHE": place}) if place in finding[2]]
    assert {finding.subject for finding in bad if finding.verdict == "bad"} == {"data folder", "data cache"}


def test_a_missing_prometheus_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert find("prometheus", {}).verdict == "note"


def test_every_extra_that_is_not_for_developers_is_looked_at() -> None:
    declared = metadata.metadata("fedemu").get_all("Provides-Extra") or []
    assert {*EXTRAS} == {*declared} - {"test", "lint", "docs"}


@pytest.mark.parametrize(
    ("extra", "package", "use"),
    [
        ("language", "transformers", "texts"),
        ("flwr", "flwr-datasets", "partitions of the kind flwr"),
        ("ray", "ray", "--on ray"),
        ("mlflow", "mlflow-skinny", "tracking to mlflow"),
    ],
)
def test_an_optional_package_is_only_noted_where_it_is_missing(
    extra: str, package: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find(extra, {}).verdict == "ok"
    version = doctor.metadata.version

    def absent(name: str) -> str:
        if name == package:
            raise doctor.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    finding = find(extra, {})
    assert finding.verdict == "note"
    assert finding.detail == f"{package} is missing; only needed for {use}: pip install 'fedemu[{extra}]'"


def test_an_optional_package_that_is_too_old_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "3.6.1" if name == "optuna" else version(name))
    assert find("search", {}) == Finding(
        "note",
        "search",
        "optuna is 3.6.1 but must be >=4.0; only needed for fedemu sweep --search: pip install 'fedemu[search]'",
    )


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda package: ["numpy>=99", "no-such-package", "ruff; extra == 'lint'"]
    )
    detail = find("packages", {}).detail
    assert "numpy is" in detail
    assert "but must be >=99" in detail
    assert "no-such-package is missing" in detail
    assert "ruff" not in detail


def test_a_torch_that_cannot_be_imported_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback ...\nOSError: libcudart.so.13 is missing\n")

    monkeypatch.setattr(doctor.subprocess, "run", fails)
    finding = find("torch", {})
    assert finding.verdict == "bad"
    assert finding.detail.startswith("OSError: libcudart.so.13 is missing; install it again")


GPU = "there is a GPU, but torch cannot open it"


@pytest.mark.parametrize(
    ("counted", "opens", "verdict", "detail"),
    [
        (0, False, "ok", "2.13.0, no CUDA device: trainers use the CPU"),
        (2, True, "ok", "2.13.0, GPU 0, GPU 1"),
        (2, False, "note", f"2.13.0, {GPU} (too old (12040)): trainers use the CPU; to use the GPU, mend its driver"),
    ],
)
def test_a_gpu_that_torch_cannot_open_is_only_noted(
    counted: int, opens: bool, verdict: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch with an old driver: it counts the GPUs, and raises where one of them is asked for anything."""
    (tmp_path / "torch.py").write_text(f"""
class cuda:
    device_count = lambda: {counted}
    is_available = lambda: {opens}
    def init():
        if not {opens}:
            raise RuntimeError("too old (12040). Please update your driver.")
    def get_device_name(place):
        cuda.init()
        return f"GPU {{place}}"
class ones:
    def __init__(self, size): self.size = size
    def sum(self): return self
    def item(self): return self.size
__version__ = "2.13.0"
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor.subprocess, "run", RUN)
    assert find("torch", {}) == Finding(verdict, "torch", detail)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compiled", "writes", "verdict", "words"),
    [
        (True, False, "ok", "Python keeps them"),
        (False, True, "ok", "the first run makes them"),
        (False, False, "note", "none, as PYTHONDONTWRITEBYTECODE says"),
    ],
)
def test_modules_that_are_compiled_anew_by_each_process_are_noted(
    compiled: bool, writes: bool, verdict: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "library" / "torch" / "__pycache__" / "torch.pyc"
    cached.parent.mkdir(parents=True)
    if compiled:
        cached.touch()
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: SimpleNamespace(cached=str(cached)))
    monkeypatch.setattr(doctor.sys, "dont_write_bytecode", not writes)
    finding = find("compiled modules", {})
    assert finding.verdict == verdict
    assert words in finding.detail
    assert verdict == "ok" or finding.detail.endswith(f"-m compileall -q {tmp_path / 'library'}")


def test_every_finding_that_is_not_well_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poor = limits.MachineLimits(files_hard=256, threads=None, memory=2**28)
    monkeypatch.setattr(limits, "this_machine", lambda: poor)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.zmq, "has", lambda name: False)
    monkeypatch.setattr(doctor, "_unmet", lambda required: iter(["torch is missing"]))
    todo = ("install", "raise", "see that", "start fewer", "set ", "make ", "correct")
    found = [
        finding for finding in doctor.examine({"FEDEMU_DATA": str(tmp_path / "absent")}) if finding.verdict != "ok"
    ]
    assert {"packages", "wandb", "zeromq", "open files", "memory", "data folder", "prometheus"} <= {
        one.subject for one in found
    }
    assert [finding for finding in found if not any(word in finding.detail for word in todo)] == []
