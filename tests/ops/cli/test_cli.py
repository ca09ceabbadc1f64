"""The command line: what it prints where, and with which code it ends."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.ops import doctor
from fedemu.ops.cli import commands, stress

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
COMMANDS = tuple(name for name, found in commands.command.commands.items() if not hasattr(found, "commands"))


def call(*arguments: str) -> int:
    """Run a command in this process, and return its exit code. Its output goes to capsys."""
    with pytest.raises(SystemExit) as ended:
        commands.command(list(arguments), prog_name="fedemu")
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forks: None) -> None:
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_help_names_every_command_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    codes = ("0 done", "1 a scenario", "2 wrong", "3 no quorum", "4 interrupted", "5 internal error")
    assert all(f"\n    {code}" in shown for code in codes)


def test_letters_that_the_outputs_encoding_lacks_are_written_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1", write_through=True))
    assert call("presets") == 0
    assert b"\\u207a" in written.getvalue()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "--help") == 0
    shown = capsys.readouterr().out
    assert f"Usage: fedemu {command}" in shown
    assert "<" not in shown.replace("<=", "")
    assert re.fullmatch(rf"  +(eval \S+)?fedemu {command}\b.*", shown.rstrip().splitlines()[-1])
    assert call(command, "-h") == 0


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "there is no command nonsense; see"),
        (("runn",), "there is no command runn; did you mean fedemu run?"),
        (("moon",), "moon is a method, which follows a preset: write fedemu run digits+moon"),
        (("completion",), "SHELL is missing"),
        (("digits",), "digits is an experiment: write fedemu run digits"),
        (("run", "--nonsense"), "--nonsense"),
        (("run", "--rounds", "many"), "--rounds"),
        (("run", "--transport", "pigeon"), "--transport pigeon must be one of zmq, memory"),
        (("run", "digits", "wsm"), "wsm stands apart: write digits+wsm"),
        (("device", "--n", "0"), "--n"),
        (("device", "--metrics-port", "70000"), "65535"),
        (("report",), "DIR"),
        (("compare",), "RUN"),
        (("compare", "here", "--target", "50"), "--target"),
    ],
)
def test_wrong_usage_ends_with_2_and_names_what_was_wrong(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedemu: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert captured.err.endswith("--help\n")


def test_a_mistake_of_our_own_is_not_told_as_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("typer.core.TyperGroup.main", fails)
    with pytest.raises(ZeroDivisionError):
        commands.command([], prog_name="fedemu")


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    assert "\n  presets " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "digitz"), 'no preset "digitz"; did you mean digits'),
        (("run", "--set", "local.learning_rate=1"), "local.learning_rate is no setting"),
        (("run", "--rounds", "0"), "rounds = 0 must be at least 1"),
        (
            ("run", "--nodes", "3"),
            "--nodes is the number of nodes of a Ray cluster; add --on ray, or leave out --nodes",
        ),
        (("run", "--devices", "10"), "fleet.per_round = 30 is more than fleet.devices = 10"),
        (("coordinator", "--seed", "-1"), "seed = -1 must be at least 0"),
        (("run", "--resume", "nowhere"), "nowhere is no run directory"),
        (("run", "digits", "--resume", "nowhere"), "leave out an experiment"),
        (("run", "--out", "new", "--resume", "nowhere"), "leave out --out"),
        (("report", "nowhere"), "nowhere does not exist; name the folder of a run"),
        (("compare", "nowhere"), "nowhere is no folder"),
        (("validate", "--set", "data.dataset=./absent"), "there is no data set './absent'"),
    ],
)
def test_wrong_configuration_is_one_sentence_and_code_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fedemu: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize(
    ("settings", "module", "extra"),
    [
        ('data.partition={kind="flwr",partitioner="IidPartitioner"}', "flwr_datasets", "flwr"),
        ("track.to=mlflow", "mlflow", "mlflow"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", "--seeds", "0,1"),
        ("coordinator",),
        ("validate",),
        ("sweep", "digits", "--seeds", "0,1", "--out", "here"),
        ("slurm",),
    ],
    ids=" ".join,
)
def test_a_missing_extra_is_told_before_data_are_read_and_folders_are_made(
    words: tuple[str, ...],
    settings: str,
    module: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("fedemu.ops.data.apart.locate", lambda *place: pytest.fail("data were looked for"))
    assert call(*words, "--set", settings) == 2
    said = capsys.readouterr().err
    assert said.startswith("fedemu: ")
    assert said.count("\n") == 1
    assert f"install it with pip install 'fedemu[{extra}]'" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_begin_makes_no_folder(tmp_path: Path) -> None:
    assert call("run", "--rounds", "0", "--out", "here") == 2
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert call("run", "--out", "mine") == 2
    assert "mine exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_run_that_has_lost_its_settings_is_shown_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lost").mkdir()
    Path("lost/config.toml").touch()
    Path("lost/metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
    said = "fedemu: warning: lost/config.toml holds no settings that can be read, so no settings of the run are told; "
    for command, *options in (("report", "lost"), ("compare", "lost", "--format", "json")):
        assert call(command, *options) == 0
        assert capsys.readouterr().err.startswith(said)


def test_validate_describes_what_an_experiment_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    method = ("--set", "algorithm.name=fedprox", "--set", "algorithm.options.mu=0.25")
    method += ("--set", "algorithm.terms={ lwf = { temperature = 3.0 }, ewc = {} }")
    sizes = ("--devices", "8", "--rounds", "3", "--seed", "7")
    assert call("validate", "digits-small", *sizes, "--set", "local.lr=0.5", "--set", "local.epochs=1", *method) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("digits-small: ok\n  rounds       3, seed 7, ")
    assert "8 devices, 5 a round" in shown
    assert "1 epoch, batch 10, lr 0.5" in shown
    assert "  algorithm    fedprox (mu 0.25), loss cross_entropy, term lwf (temperature 3.0), term ewc\n" in shown


def test_validate_tells_an_option_that_is_called_kind_beside_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(
        "from torch import nn\n"
        "from fedemu.algorithms import FedAvg\n"
        "class Own(FedAvg):\n"
        "    def __init__(self, ingredients, kind): super().__init__(ingredients)\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, input_shape, classes, kind, width):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, classes))\n"
    )
    model = ("--set", "model={ name = 'own.py:Net', kind = 'a', width = 8 }")
    method = ("--set", "algorithm={ name = 'own.py:Own', options = { kind = 'b' } }")
    assert call("validate", "digits-small", *model, *method) == 0
    shown = capsys.readouterr().out
    assert "  model        own.py:Net (kind a, width 8)\n" in shown
    assert "  algorithm    own.py:Own (kind b), loss cross_entropy\n" in shown


def test_validate_tells_how_much_is_public(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", "digits-small", "--set", "data.public.fraction=0.1") == 0
    shown = capsys.readouterr().out
    assert "  samples      1293 to train on" in shown
    assert "  public       108 samples to train on, 36 for validation" in shown


@pytest.mark.parametrize(("devices", "said"), [("3", "479 a device"), ("4", "359 to 360 a device")])
def test_validate_tells_how_many_samples_a_device_has(
    devices: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    even = ("--set", "data.partition.kind=iid", "--set", "fleet.per_round=2")
    assert call("validate", "digits-small", "--devices", devices, *even) == 0
    assert f"  samples      1437 to train on ({said}), 360 to test on, 10 classes\n" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "said"), [(3, "rose 0, rose 1, rose 2"), (12, "rose 6, rose 7 and 2 more")])
def test_validate_tells_the_first_classes_by_their_names(
    count: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    rows = (f'{place},"rose\n{place % count}"\n' for place in range(60))
    Path("flowers.csv").write_text("width,label\n" + "".join(rows))
    smaller = ("--set", "fleet.devices=2", "--set", "fleet.per_round=1", "--set", "data.partition.kind=iid")
    assert call("validate", "digits-small", "--set", "data.dataset=flowers.csv", *smaller) == 0
    classes = re.search(r"\n  classes      (rose 0, .*)\n", capsys.readouterr().out)
    assert classes is not None
    assert classes[1].endswith(said)


def test_validate_warns_of_tasks_that_find_no_public_data_of_their_classes(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("seed=2", "data.public.fraction=0.025", "stream.tasks=10", "stream.rounds_per_task=3")
    assert call("validate", "digits-tasks", *(part for setting in few for part in ("--set", setting))) == 0
    said = "warning: none of the 9 public samples for validation is of a class that comes before period 2; until then "
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.name=mlpp", "model 'mlpp' is none of"),
        ("model.hiden=[3]", "'mlp' has no option model.hiden"),
        ("model.hidden=[4294967295]", "does not fit into this machine's memory"),
        ("algorithm.name=fedavgg", "algorithm 'fedavgg' is none of"),
        ("algorithm.loss=absent:loss", "'absent' can't be imported"),
        ("data.dataset=absent:make", "names a module 'absent' that can't be found"),
        ("fleet.devices=5000", "5000 devices"),
        ("data.public.fraction=0.001", "data.public.fraction = 0.001 takes 1 of 1437 training samples"),
    ],
)
def test_validate_finds_what_only_data_model_and_method_can_tell(
    setting: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("validate", "digits-small", "--set", setting) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") <= 2
    assert said in captured.err.splitlines()[-1]


@pytest.mark.usefixtures("digits_decoded")
def test_validate_gives_the_resolved_experiment_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("validate", "digits-small", "--format", "json", "--set", "diagnose.samples=9") == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert said["ok"] is True
    told = "diagnose.samples = 9 has no effect, because diagnose.every = 0 diagnoses no round"
    assert captured.err == f"fedemu: warning: {told}\n"
    assert said["experiment"]["fleet"]["devices"] == 20
    assert len(said["digest"]) == 64


@pytest.mark.parametrize(
    "command",
    [["validate"], ["run", "--rounds", "1", "--transport", "memory", "--set", "runtime.report=false"]],
    ids=["validate", "run"],
)
def test_what_own_code_prints_is_no_part_of_the_data_for_programs(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("talks.py").write_text(
        "import ctypes, os\n\nfrom fedemu.algorithms import FedAvg\n\n"
        "class Method(FedAvg):\n"
        "    def __init__(self, ingredients):\n        print('made')\n        super().__init__(ingredients)\n"
        "        os.system('echo by a program')\n        ctypes.CDLL(None).printf(b'by a library')\n\n"
        "    def round(self, state, context):\n        print('round', context.round)\n"
        "        return (yield from super().round(state, context))\n"
    )
    name, *more = command
    assert call(name, "digits-small", "--format", "json", "--set", "algorithm.name=talks.py:Method", *more) == 0
    captured = capfd.readouterr()
    assert all(text in captured.err for text in ("made", "by a program", "by a library"))
    said = json.loads(captured.out)
    assert said.get("ok") or (said["rounds"] == 1 and "round 1" in captured.err)


def test_the_doctors_code_tells_whether_something_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = doctor.Finding
    for verdict, code in (("ok", 0), ("note", 0), ("bad", 2)):
        found = [finding("ok", "python", "3.11.7"), finding(verdict, "memory", "some")]  # type: ignore[arg-type]
        monkeypatch.setattr(doctor, "examine", lambda environment, found=found: found)
        assert call("doctor", "--format", "json") == code
        assert json.loads(capsys.readouterr().out)[1]["verdict"] == verdict


def test_the_console_script_and_the_package_are_the_same_command() -> None:
    script = Path(sys.executable).with_name("fedemu")
    shown = [
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        for command in ([str(script), "presets"], [sys.executable, "-m", "fedemu", "presets"])
    ]
    assert shown[0] == shown[1] != ""


def ends(
    begin: str, cases: list[Any], folder: Path, inherited: Sequence[int] = (), **environment: str
) -> list[tuple[str, int]]:
    """Run commands in processes of their own: what each writes to stderr, and its exit code.

    One interpreter imports the commands, and forks for each of the ``cases``. A process executes ``begin``, where
    ``case`` is its case, and ends as every interpreter does. The descriptors ``inherited`` are open there; the first
    is its output.
    """
    script = f"""
import json, os, sys
from fedemu.ops.cli import commands
from fedemu.ops.cli.__main__ import main
ended = []
for case in {cases!r}:
    said = os.open("said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    process = os.fork()
    if process == 0:
        os.dup2(said, 2)
        {begin}
    status = os.waitpid(process, 0)[1]
    with open("said") as file:
        ended.append((file.read(), os.waitstatus_to_exitcode(status)))
with open("ended", "w") as file:
    json.dump(ended, file)
"""
    command = [sys.executable, "-c", script]
    output = inherited[0] if inherited else subprocess.DEVNULL
    how: dict[str, Any] = {"env": os.environ | environment, "stdout": output, "pass_fds": inherited}
    subprocess.run(command, timeout=60, check=True, cwd=folder, **how)
    return [(said, code) for said, code in json.loads((folder / "ended").read_text())]


def test_a_signal_at_the_very_end_of_the_process_does_not_take_its_exit_code(tmp_path: Path) -> None:
    late = "sys.late = type('Late', (), {'__del__': lambda *_, kill=os.kill, pid=os.getpid(): kill(pid, case)})()"
    ended = ends(f"{late}; main(['nonsense'])", [int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)], tmp_path)
    assert [code for _, code in ended] == [2, 2, 2]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_error_and_a_full_disk_is_told(unbuffered: str, tmp_path: Path) -> None:
    nobody, pipe = os.pipe()
    os.close(nobody)
    full = os.open("/dev/full", os.O_WRONLY)
    told = "fedemu: the output or a file cannot be written: the disk is full; make room there\n"
    cases = [(output, words) for output in (pipe, full) for words in (["keys", "list"], ["--help"], ["presets"])]
    ended = ends("os.dup2(case[0], 1); main(case[1])", cases, tmp_path, (pipe, full), PYTHONUNBUFFERED=unbuffered)
    assert ended == [("", 0)] * 3 + [(told, 5)] * 3
    os.close(pipe)
    os.close(full)


def test_the_list_of_scenarios_is_the_same_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("stress", "--list") == 0
    shown = capsys.readouterr().out
    assert call("stress", "--list", "--format", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [f"{each['name']:22}{each['what']}" for each in listed] == shown.splitlines()
    assert call("stress", "--list", "garbage", "flapping") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["garbage", "flapping"]


def test_a_scenario_that_is_named_twice_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []
    monkeypatch.setattr(stress, "_play_all", lambda chosen, *_: played.extend(one.name for one in chosen) or [])
    assert call("stress", "garbage", "flapping", "garbage") == 0
    assert played == ["garbage", "flapping"]


def test_the_page_of_the_command_line_lists_every_option_with_the_commands_that_have_it() -> None:
    found = dict(commands.command.commands)
    found |= {f"keys {name}": command for name, command in found.pop("keys").commands.items()}
    has = {
        (option, name)
        for name, command in found.items()
        if name not in ("slurm", "kubernetes", "stress", "bench")
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    section = PAGE.read_text(encoding="utf-8").partition("\n## Options\n")[2].partition("\n## ")[0]
    told = set()
    for line in section.splitlines():
        if line.startswith("| `--"):
            _, options, names, *_ = re.split(r"(?<!\\)\|", line)
            listed = re.findall(r"`(--[a-z-]+)", options)
            told |= {(option, name.strip()) for option in listed for name in names.split(",")}
    assert told == has


def test_a_command_computes_in_numpy_with_one_thread_as_trainers_do() -> None:
    code = """
from contextlib import suppress
from fedemu.ops.cli.__main__ import main
with suppress(SystemExit):
    main(["--version"])
import numpy
from threadpoolctl import threadpool_info
print([found["num_threads"] for found in threadpool_info() if found["internal_api"] == "openblas"][-1])
"""
    several = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=several, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split()[-1] == "1"


def test_a_home_that_cannot_be_written_and_a_wrong_backend_are_no_matter_for_plots(tmp_path: Path) -> None:
    code = """
from contextlib import suppress
from fedemu.ops.cli.__main__ import main
with suppress(SystemExit):
    main(["--version"])
import matplotlib
print(matplotlib.get_configdir())
"""
    (tmp_path / "home").write_text("")  # a file, so that no folder can be made in it, by root neither
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path), "MPLBACKEND": "of another machine"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert Path(ended.stdout.split()[-1]).is_relative_to(tmp_path)
    assert ended.stderr == ""


def test_a_command_tells_that_it_decodes_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=BlockingIOError(errno.EAGAIN, "")))
    assert call("validate", "digits-small") == 2
    told, refused = capfd.readouterr().err.splitlines()
    assert told == "fedemu: decoding the data set digits, once on this machine"
    assert "no process can be started" in refused
