"""What pyproject.toml, constraints.txt and the folders say of each other."""

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
LAYERS = ("protocol", "algorithms", "device", "coordinator", "ops")
CODE = {".py", ".pyc"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    folders = {path.parent for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py")}
    names = {"fedemu." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == names


def test_every_file_that_is_no_code_is_shipped(project: dict[str, Any]) -> None:
    tables = project["tool"]["setuptools"]["package-data"]
    shipped = set()
    for name in project["tool"]["setuptools"]["packages"]:
        folder = ROOT.joinpath(*name.split(".")[1:])
        for pattern in [*tables["*"], *tables.get(name, [])]:
            shipped |= set(folder.glob(pattern))
    files = {path for layer in LAYERS for path in (ROOT / layer).rglob("*") if path.is_file()}
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
