"""What pyproject.toml, constraints.txt and the folders say of each other."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
FLOORS = ("protocol", "algorithms", "device", "coordinator", "ops")
CODE = {".py", ".pyc"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def folder_of(package: str) -> Path:
    """Where the files of a package lie. The root of the repository is the package ``fedemu`` itself."""
    return ROOT.joinpath(*package.split(".")[1:])


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    folders = {path.parent for floor in FLOORS for path in (ROOT / floor).rglob("__init__.py")}
    packages = project["tool"]["setuptools"]["packages"]
    assert project["tool"]["setuptools"]["package-dir"] == {"fedemu": "."}
    assert {folder_of(name) for name in packages} == {ROOT, *folders}
    assert len(packages) == len({*packages})


def test_make_takes_every_python3_that_the_package_allows(project: dict[str, Any], tmp_path: Path) -> None:
    python = tmp_path / "python3"
    words = "Programming Language :: Python :: "
    allowed = [word.removeprefix(words) for word in project["project"]["classifiers"] if word.startswith(words)]
    for version in (version for version in allowed if "." in version):
        say = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0); exec(sys.argv[1])"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{say}" "$2"\n')
        python.chmod(0o755)
        command = ["make", "--silent", "--eval", "taken: ; @echo $(PYTHON)", "taken"]
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        taken = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, timeout=60, check=True)
        assert taken.stdout.strip() == "python3", version


@pytest.mark.parametrize(
    ("settings", "uv", "installers"),
    [
        ("", "exit 0", ["uv"]),
        ("global.extra-index-url='https://packages.example'", "exit 0", ["uv"]),
        ("", "exit 2", ["uv", "pip"]),
        ("global.index-url='https://packages.example'", "exit 0", ["pip"]),
        (":env:.no-index='1'", "exit 0", ["pip"]),
        ("", None, ["pip"]),
    ],
    ids=["alone", "one more index", "uv fails", "another index", "no index", "without uv"],
)
def test_uv_installs_packages_unless_only_pip_can(
    tmp_path: Path, settings: str, uv: str | None, installers: list[str]
) -> None:
    called = tmp_path / "called"
    scripts = {"python": f'case "$*" in "-m pip config list") echo "{settings}";; *) echo "pip $*" >> {called};; esac'}
    if uv:
        scripts["uv"] = f'echo "uv $*" >> {called}; {uv}'
    for name, lines in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    subprocess.run([".ci/install", str(tmp_path / "python"), "numpy"], cwd=ROOT, timeout=60, check=True)
    lines = called.read_text().splitlines()
    assert [line.split()[0] for line in lines] == installers
    assert all(line.endswith("--constraint constraints.txt numpy") for line in lines)


def test_the_package_is_found_beside_a_checkout_of_its_name(tmp_path: Path) -> None:
    """Python takes a folder ``fedemu`` of the working folder for the package, as after ``git clone`` of the project."""
    (tmp_path / "fedemu").symlink_to(ROOT, target_is_directory=True)
    command = [sys.executable, "-c", "import fedemu; print(fedemu.__version__)"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == metadata.version("fedemu")


def test_every_file_that_is_no_code_is_shipped(project: dict[str, Any]) -> None:
    tables = project["tool"]["setuptools"]["package-data"]
    shipped = set()
    for name in project["tool"]["setuptools"]["packages"]:
        for pattern in tables.get(name, []):
            shipped |= set(folder_of(name).glob(pattern))
    files = {path for floor in FLOORS for path in (ROOT / floor).rglob("*") if path.is_file()}
    files = {path for path in files if path.suffix not in CODE and "__pycache__" not in path.parts}
    assert files - shipped == set()


def test_every_requirement_has_a_pinned_version_that_meets_it(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"].values()
    pinned = pins()
    for text in [*project["project"]["dependencies"], *(text for extra in extras for text in extra)]:
        requirement = Requirement(text)
        version = pinned.get(canonical(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


def test_torch_is_pinned_exactly_and_without_a_local_version() -> None:
    assert pins()["torch"] == "2.13.0"


def test_the_version_is_the_installed_packages(project: dict[str, Any]) -> None:
    assert metadata.version("fedemu") == project["project"]["version"]


def test_the_tests_have_every_optional_package(project: dict[str, Any]) -> None:
    """Without one of them a test would be skipped."""
    extras = project["project"]["optional-dependencies"]
    optional = {text for name, extra in extras.items() if name not in ("test", "lint", "docs") for text in extra}
    assert optional <= {*extras["test"]}


def test_an_optional_package_is_not_required_as_well(project: dict[str, Any]) -> None:
    required = {canonical(Requirement(text).name) for text in project["project"]["dependencies"]}
    extras = project["project"]["optional-dependencies"].values()
    assert required.isdisjoint(canonical(Requirement(text).name) for extra in extras for text in extra)


def test_the_citation_names_the_version_the_licence_and_the_address_of_the_package(project: dict[str, Any]) -> None:
    table = project["project"]
    cited = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    assert cited["version"] == table["version"]
    assert cited["license"] == table["license"]
    assert cited["url"].strip('"') == table["urls"]["Homepage"]
    assert (ROOT / table["license-files"][0]).read_text().lstrip().startswith("Apache License")
