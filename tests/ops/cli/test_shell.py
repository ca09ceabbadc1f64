"""``fedemu completion``: what a shell is given, and what ``fedemu`` answers when a shell asks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.ops.cli import commands
from fedemu.ops.cli.shell import complete


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> list[str]:
    """What bash is offered behind these words, of which the last is not finished."""
    monkeypatch.setenv("_FEDEMU_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"fedemu {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    with pytest.raises(SystemExit) as ended:
        commands.command([], prog_name="fedemu")
    assert not ended.value.code
    return capsys.readouterr().out.split()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "digits-1").mkdir(parents=True)
    (tmp_path / "runs" / "digits-1" / "config.toml").touch()
    (tmp_path / "churning.toml").touch()
    (tmp_path / "churning.txt").touch()
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("ru", ["run"]),
        ("run digits-s", ["digits-small"]),
        ("run digits+moo", ["digits+moon"]),
        ("run churn+wsm+scaf", ["churn+wsm+scaffold", "churn+wsm+scaffold-weights"]),
        ("run chu", ["churn", "churning.toml"]),
        ("run --see", ["--seed", "--seeds"]),
        ("run --transport m", ["memory"]),
        ("run --set local.batch", ["local.batch_size="]),
        ("run --set runtime.device_", ["runtime.device_type="]),
        ("run --resume r", ["runs/"]),
        ("report runs/", ["runs/digits-1"]),
        ("compare runs/digits-1 runs/d", ["runs/digits-1"]),
        ("sweep evi", ["evidence"]),
        ("sweep digits --grid local.batch", ["local.batch_size="]),
        ("suite forg", ["forgetting"]),
        ("suite forgetting --method scaffold-", ["scaffold-weights"]),
        ("presets scaffold-", ["scaffold-weights"]),
        ("init --from churn+fedno", ["churn+fednova"]),
        ("run zzz", []),
        ("run /no/such/folder/x", []),
    ],
)
def test_a_shell_is_offered_what_may_follow(
    words: str, offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(monkeypatch, capsys, words) == offered


STRANGE = ["$(touch x)", r"\$(touch x)", "`touch x`", "a b", "a;b", "a&b", "a'b", 'a"b', "a*b", "a{b", "a\nb", "\udcff"]
"""Names that a shell would have to quote."""


@pytest.mark.parametrize("strange", STRANGE)
def test_no_path_is_offered_that_a_shell_would_have_to_quote(strange: str) -> None:
    Path(f"{strange}.toml").touch()
    Path(strange).mkdir()
    Path(strange, "plain.toml").touch()
    assert complete.toml_files("") == ["churning.toml", "runs/"]
    assert complete.toml_files(strange) == complete.toml_files(f"{strange}/") == []
    assert complete.presets(f"{strange}+wsm") == []


def test_a_name_that_begins_like_an_option_or_a_home_is_offered_with_its_folder_alone() -> None:
    for name in ("-x.toml", "=x.toml", "~x.toml", "Ünder_1.2-3,4+5@6%7=8:9~.toml"):
        Path(name).touch()
    assert complete.toml_files("") == ["churning.toml", "runs/", "Ünder_1.2-3,4+5@6%7=8:9~.toml"]
    for start in "-=~":
        assert complete.toml_files(start) == []
        assert complete.toml_files(f"./{start}") == [f"./{start}x.toml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_by_the_same_variable(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands.command(["completion", shell], prog_name="fedemu")
    assert not ended.value.code
    assert f"_FEDEMU_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_bash_completes_with_the_script_that_is_printed(tmp_path: Path) -> None:
    script = """
        eval "$(fedemu completion bash)"
        COMP_WORDS=(fedemu run digits+fedn) COMP_CWORD=2
        _fedemu_completion fedemu 2> errors
        echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.split() == ["digits+fednova", "digits+fedntd"]


_ZSH = """
    compdef() { true; }
    _arguments() { print -r -- "$@"; }
    eval "$(fedemu completion zsh)"
    words=(fedemu run digits+fedn) CURRENT=3
    _fedemu_completion
"""
_FISH = """
    fedemu completion fish | source
    complete -C "fedemu run digits+fedn"
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("shell", "script"), [("zsh", ["-f", "-c", _ZSH]), ("fish", ["--no-config", "-c", _FISH])])
def test_zsh_and_fish_complete_with_the_script_that_is_printed(shell: str, script: list[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [shell, *script],
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"digits\+\w+", ended.stdout) == ["digits+fednova", "digits+fedntd"]


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import os, sys\n"
        "os.environ |= {'_FEDEMU_COMPLETE': 'complete_bash', 'COMP_WORDS': 'fedemu run --set fl', 'COMP_CWORD': '3'}\n"
        "from fedemu.ops.cli import commands\n"
        "try:\n    commands.command([], prog_name='fedemu')\n"
        "except SystemExit:\n"
        "    print(*({'torch', 'matplotlib', 'sklearn', 'datasets', 'scipy', 'asyncio'} & {*sys.modules}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *offered, heavy = ended.stdout.split("\n")[:-1]
    assert "fleet.devices=" in offered
    assert heavy == ""
