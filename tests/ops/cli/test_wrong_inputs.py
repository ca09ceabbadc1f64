"""What a stranger may write that is wrong: each is refused in one plain sentence, with code 2, and leaves nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedemu.ops.cli import commands

FILES: dict[str, bytes] = {
    "binary.toml": bytes(range(256)),
    "nul.toml": b"\0\0\0",
    "utf16.toml": "rounds = 2\n".encode("utf-16"),
    "latin.toml": 'name = "caf\xe9"'.encode("latin-1"),
    "prose.toml": b"this is no toml",
    "json.toml": b'{"rounds": 3}',
    "twice.toml": b"rounds = 1\nrounds = 2\n",
    "tables.toml": b"[local]\nlr=1\n[local]\nlr=2\n",
    "huge.toml": b"seed = 1" + b"0" * 5000,
    "deep.toml": b"a = " + b"[" * 3000,
    "quote.toml": b"name = 'x\n",
    "word.toml": b"name = mine\n",
    "n\u00fcll.toml": b"rounds = 0\n",
    "nested.toml": b"[fleet.devices]\nn = 3\n",
    "sweep.toml": b"[[parts]]\nname = 'x'\n",
    "seeds.toml": b"[[parts]]\nname = 'x'\nexperiments = ['digits']\nseeds = ['a']\n",
    "group/a/config.toml": b"rounds = 1\n",
    "group/b/config.toml": b"rounds = 1\n",
    "my runs/seed-1/config.toml": b"rounds = 1\n",
    "my runs/seed-2/config.toml": b"rounds = 1\n",
    "damaged/config.toml": b"rounds = 1\n",
    "damaged/metrics.jsonl": b'{"round": "x"}\n',
    "taken/config.toml": b"rounds = 1\n",
    "taken/metrics.jsonl": b'{"round": 1, "accuracy": 0.5}\n',
    "taken/plots": b"where a folder is needed",
}
PYDANTIC = re.compile(r"Input should|unable to parse|valid (integer|number|string)|validation|Field required|pydantic")


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)


def settings(*given: str) -> list[str]:
    return ["run", "digits-small", *(word for setting in given for word in ("--set", setting))]


WRONG: list[tuple[Sequence[str], str]] = [
    # Files.
    (["run", "binary.toml"], "binary.toml is no TOML file: it is not text in UTF-8; save it as UTF-8"),
    (["run", "utf16.toml"], "it is not text in UTF-8"),
    (["run", "latin.toml"], "it is not text in UTF-8"),
    (["run", "nul.toml"], "nul.toml is not valid TOML: this is no [table], no key = value and no comment, at line 1"),
    (["run", "json.toml"], "this is no [table], no key = value and no comment, at line 1"),
    (["run", "prose.toml"], "a line must be a [table] or key = value, at line 1"),
    (["run", "twice.toml"], "a key is set twice, at line 2"),
    (["run", "tables.toml"], "the table [local] is there twice, at line 3"),
    (["run", "huge.toml"], "huge.toml holds a number of too many digits"),
    (["run", "deep.toml"], "its lists or tables are nested too deep"),
    (["run", "quote.toml"], "quote.toml is not valid TOML: "),
    (["run", "word.toml"], "text needs quotation marks, a number"),
    (["run", "n\u00fcll.toml"], "rounds = 0 must be at least 1"),
    (["run", "nested.toml"], "fleet.devices = { n = 3 } must be a whole number of at least 1"),
    (["run", "/dev/zero"], "/dev/zero is no experiment: it holds more than 10,000,000 characters"),
    (["keys", "list", "--keys", "json.toml"], "json.toml is no folder; name that of the keys with --keys"),
    (["keys", "approve", "x", "/dev/zero", "--keys", "k"], "/dev/zero is a device of the system, and holds no key"),
    (["schema", "--out", "/dev/zero"], "/dev/zero exists, is no schema of fedemu, and is not overwritten"),
    (settings("data.dataset=~nobody-here/x"), "~nobody-here/x begins with ~, and this machine knows no such home"),
    (["keys", "list", "--keys", "~nobody-here/k"], "~nobody-here/k begins with ~, and this machine knows no such home"),
    (["run", "group"], "group is a folder, not an experiment's file"),
    (["run", "x" * 300], "can't be used: File name too long; name another"),
    (["run", "a\nb"], 'there is no file and no preset "a\\nb"; `fedemu presets` lists them'),
    (["run", "nowhere.toml"], "there is no file nowhere.toml; `fedemu init nowhere.toml` writes one to start from"),
    # Names.
    (["run", "scaffold"], "scaffold is a method, which follows a preset: write digits+scaffold"),
    (["run", "digits+banana"], 'there is no method "banana" to follow a preset after "+"; `fedemu presets` lists them'),
    (["run", "digits", "moon"], "moon stands apart: write digits+moon"),
    # Settings.
    (settings("local.lr"), '"local.lr" is no override; write section.key=value'),
    (settings("runtime.bind=foo"), "runtime.bind: the address 'foo' is not of the form tcp://HOST:PORT or ipc://PATH"),
    (settings("local.lr="), 'local.lr = "" must be a number from 1e-38 to 1e+38'),
    (settings("local.lr=nan"), "local.lr = nan must be finite; write a number"),
    (settings("local.lr=1e400"), "local.lr = inf must be finite; write a large number instead"),
    (settings("rounds=99999999999"), "rounds = 99999999999 must be from 1 to 2147483647"),
    (settings("rounds=1e3"), "rounds = 1000.0 must be a whole number of at least 1"),
    (settings("faults.corruptions=[]"), "must be a list that is not empty; its values are any of nan, shape, truncate"),
    (settings("stream=drift"), 'stream = "drift" must be a table; write stream.kind = "drift"'),
    (settings("model=cnn"), 'model = "cnn" must be a table; write model.name = "cnn"'),
    (settings("local.augment=crop"), 'local.augment = "crop" must be a list, as in ["crop"]'),
    (settings("learning_rate=1"), "learning_rate is no setting; did you mean local.lr?"),
    (settings("banana=1"), "banana is no setting; an experiment has name, seed, rounds, "),
    (settings("local.lr=1", "local.lr.x=1"), '"local.lr.x=1" sets a key inside lr'),
    (settings("availability={kind='trace',file='none.csv'}"), 'availability.file = "none.csv" is not there: looked in'),
    (settings("data.dataset=./none"), "there is no data set './none'"),
    (settings("replay.strategy=reservoir", "replay.capacity=5"), "has nothing to replay in a stream of one period"),
    # Options.
    (["run", "--rounds", "many"], "--rounds many must be a whole number"),
    (["run", "--rounds", "1.5"], "--rounds 1.5 must be a whole number"),
    (["run", "--rounds", ""], "--rounds is empty; is a variable of the shell not set? See fedemu run --help"),
    (["run", ""], "EXPERIMENT is empty; is a variable of the shell not set?"),
    (["report", "taken", "--figures="], "--figures is empty"),
    (["compare", "group", ""], "RUN... is empty"),
    (["device", "--server-key", ""], "--server-key is empty"),
    (["export", "taken", "--to", "tensorboard", "--out", ""], "--out is empty"),
    (["slurm", "digits-small", "--partition", "", "--nodes", "1000"], "--nodes 1000 is more than the 20 devices"),
    ([""], "there is no command ''; see fedemu --help"),
    (["run", "--rounds"], "--rounds needs a value after it; see fedemu run --help"),
    (["run", "--round", "3"], "there is no option --round; did you mean --rounds"),
    (["run", "--banana"], "there is no option --banana; see fedemu run --help"),
    (["run", "--seeds", "3-1"], "3-1 is no list of seeds"),
    (["run", "--seeds", "-"], "- is no list of seeds"),
    (["run", "--seeds", "9" * 5000], "is no list of seeds"),
    (["run", "--device-type", "gpu"], "--device-type gpu must be one of auto, cpu, cuda; see fedemu run --help"),
    (["run", "--metrics-port", "70000"], "--metrics-port 70000 must be from 1 to 65535"),
    (["run", "digits-small", "--metrics-port", "65535", "--out", "x"], "leaves no port after it, which the devices'"),
    (["run", "digits-small", "--metrics-port", "65535", "--seeds", "1-2", "--out", "x"], "choose one below 65535"),
    (["run", "--metrics-port", "65535", "--resume", "group/a"], "runtime.metrics_port = 65535 leaves no port after it"),
    (["coordinator", "--bind", "localhost:5577"], "the address 'localhost:5577' is not of the form tcp://HOST:PORT"),
    (
        ["run", "digits-small", "--transport", "memory", "--bind", "tcp://127.0.0.1:5577"],
        "--bind has no effect with the transport memory, where everything is one process; leave one out",
    ),
    (["run", "--seeds", "0-1", "--transport", "memory", "--trainers", "2"], "--trainers has no effect with"),
    (["coordinator", "--set", "runtime.transport=memory", "--keys", "k"], "--keys has no effect with"),
    (settings("runtime.on=banana"), "--on 'banana' is no engine; write ray, or ray://HOST:10001 for a cluster"),
    (["run", "--seeds", "0-1", "--set", "runtime.on=banana"], "--on 'banana' is no engine"),
    (["edge", "--bind", "tcp://127.0.0.1:0", "--metrics-address", "::1"], "--metrics-address needs --metrics-port"),
    (["edge", "--bind", "tcp://127.0.0.1:5577"], "this edge would connect to itself: --bind tcp://127.0.0.1:5577 and"),
    (["edge", "--bind", "tcp://0.0.0.0:5601", "--connect", "tcp://localhost:5601"], "give --bind another port"),
    (
        ["run", "digits-small", "--bind", "tcp://127.0.0.1:5601", "--metrics-port", "5601", "--out", "x"],
        "--bind tcp://127.0.0.1:5601 and --metrics-port 5601 are one place; give one of them another port",
    ),
    (
        ["coordinator", "digits-small", "--metrics-port", "5577", "--out", "x"],
        "--bind tcp://127.0.0.1:5577 and --metrics-port 5577 are one place",
    ),
    (
        ["edge", "--bind", "tcp://localhost:5601", "--metrics-port", "5601", "--metrics-address", "0.0.0.0"],
        "--bind tcp://localhost:5601 and --metrics-port 5601 are one place",
    ),
    (["device", "--metrics-address", "127.0.0.1"], "--metrics-address needs --metrics-port"),
    (["run", "--log-level", "loud"], "--log-level loud must be one of debug, info, warning, error; see"),
    (["device", "--n", "-1"], "--n -1 must be at least 1"),
    (["compare", "group", "--target", "nan"], "--target nan must be from 1e-06 to 1"),
    (["report", "group"], "group holds 2 runs; compare them with fedemu compare group"),
    (["report", "group/.."], "holds 6 runs"),
    (["report", "my runs"], "with fedemu compare 'my runs', or write the report of one with fedemu report 'my runs/"),
    (
        ["run", "my runs/seed-1"],
        "is a folder; name my runs/seed-1/config.toml, or go on with --resume 'my runs/seed-1'",
    ),
    (["run", "digits-small", "--out", "my runs/seed-1"], "continue its run (--resume 'my runs/seed-1')"),
    (["run", "digits-small", "--seeds", "1", "--out", "my runs"], "or go on with its seeds by --resume 'my runs'"),
    (["run", "my new.toml"], "there is no file my new.toml; `fedemu init 'my new.toml'` writes one to start from"),
    (["report", "damaged"], "round is 'x', and must be a whole number"),
    (["report", "taken"], "taken/plots can't be used: File exists; name another"),
    (["run", "--resume", ".", "--seeds", "0-1"], ". holds no group of seeds; start one in another folder"),
    (
        ["sweep", "digits-small", "--out", "group/a"],
        "group/a is a run directory, in which nobody looks for runs; choose",
    ),
    (["sweep", "sweep.toml", "--out", "x"], "sweep.toml: the part x names no experiments and no presets; name some"),
    (["sweep", "seeds.toml", "--out", "x"], 'seeds.toml: parts[0].seeds[0] = "a" must be a whole number'),
    (
        ["sweep", "digits", "--out", "x", "--seeds", "0,1", "--set", "seed=3"],
        "--set seed is for one seed, and here are several; leave out --set seed",
    ),
    (
        ["sweep", "digits-small", "--out", "new", "--grid", "rounds=1,2", "--rounds", "3"],
        "--grid varies rounds, and another option sets it to one value; leave one of them out",
    ),
    (["sweep", "digits-small", "--out", "json.toml"], "json.toml is a file; name a folder with --out"),
    (["sweep", "digits-small", "--out", "new", "--grid", "local.lr=1,0"], "digits-small,local.lr=0: local.lr = 0 must"),
    (["sweep", "digits-small", "--out", "new", "--set", "track.to=['x']"], 'there is no tracker "x"; choose from'),
    (["sweep", "digits-small", "--out", "x", "--search", "local.lr=0.1..inf"], "needs two finite numbers"),
    (
        ["sweep", "digits-small", "--out", "x", "--on", "ray", "--set", "runtime.device_type=cuda"],
        "runtime.device_type is cuda, but with --on ray each run of a sweep computes on one core; choose auto",
    ),
    (
        ["sweep", "digits-small", "--out", "json.toml", "--search", "local.lr=0.1..1"],
        "json.toml is a file; name a folder with --out",
    ),
    (["suite", "forgetting", "--size", "tiny", "--list", "--method", "nope"], 'there is no method "nope" to follow a'),
    (["sweep", "evidence"], "--out is missing; see fedemu sweep --help"),
    (["stress", "campaign", "--cases", "3", "--minutes", "1"], "--cases and --minutes exclude each other; leave out"),
    (["stress", "campaign", "--case", "3", "--cases", "1"], "--case and --cases exclude each other; leave out all"),
    (["stress", "campaign", "--minutes", "1", "--case", "0"], "--case and --minutes exclude each other"),
    (["bench", "wire", "training", "--large", "--quick"], "--large is for fedemu bench fleet or selection"),
    (["stress", "--case", "3"], "--case is for fedemu stress campaign; leave it out"),
    (["stress", "--list", "wrong"], "there is no scenario 'wrong'; choose from mass-crash, flapping, slow-uploads,"),
    (["stress", "soak", "--list"], "--list is for fedemu stress SCENARIO; leave it out"),
    (["stress", "strangers", "--seed", "3", "--attack", "x"], "--seed is for fedemu stress SCENARIO or campaign or"),
    (["stress", "--list", "--minutes", "3"], "--minutes is for fedemu stress campaign or soak or"),
    (["bench", "wire", "--problems", "3"], "--problems is for fedemu bench selection; leave it out"),
    (["sweep", "digits-small", "--out", "x", "--trials", "7"], "--trials is for a search; add --search KEY=LOW..HIGH"),
    (["stress", "soak", "--minutes", "0"], "--minutes 0 must be from 0.5 to 100000; see fedemu stress --help"),
    (["stress", "soak", "--minutes", "inf"], "--minutes inf must be from 0.5 to 100000"),
    (["stress", "strangers", "--seconds", "inf", "--attack", "x"], "--seconds inf must be from 1 to 3600"),
    (["stress", "strangers", "--attack", "nope", "--out", "new"], "there is no attack 'nope'; choose from messages"),
    (["stress", "soak", "--edge"], "--edge is for fedemu stress strangers"),
    (["stress", "recovery", "--cases", "3"], "--cases is for fedemu stress campaign; leave it out"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[" ".join(words)[:60] for words, _ in WRONG])
@pytest.mark.usefixtures("uncollected")
def test_a_wrong_input_is_refused_in_one_plain_sentence(
    arguments: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as ended:
        commands.command(list(arguments), prog_name="fedemu")
    out, told = capsys.readouterr()
    assert (ended.value.code, out, told.count("\n")) == (2, "", 1), told
    assert told.startswith("fedemu: ")
    assert said in told
    assert not PYDANTIC.search(told)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        *(("report", "shown"), ("report --curves 1", "shown"), ("report", "shown/plots")),
        *(("compare", "compare"), ("compare", "compare/plots")),
    ],
)
def test_a_read_only_folder_for_a_page_or_its_plots_is_refused(
    command: str, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken/plots").unlink()
    Path("taken").rename("shown")
    monkeypatch.setattr(os, "access", lambda path, mode: (str(path), mode) != (folder, os.W_OK))
    with pytest.raises(SystemExit) as ended:
        commands.command([*command.split(), "shown"], prog_name="fedemu")
    assert (ended.value.code, [*Path().rglob("*.png"), *Path().rglob("*.html")]) == (2, [])
    assert f"fedemu: {folder} is read-only; " in capsys.readouterr().err


def test_a_mistyped_variable_is_told_where_it_is_no_mistake_and_refused_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_DATTA", "/data")
    monkeypatch.setenv("FEDEMU_KEYS", "keys")
    sentence = "the environment variable FEDEMU_DATTA names no setting and no folder; did you mean FEDEMU_DATA?\n"
    for arguments, code, told in (
        (["presets", "digits"], 0, f"fedemu: warning: {sentence}"),
        (["keys", "list"], 0, f"fedemu: warning: {sentence}"),
        (["stress", "--list"], 0, f"fedemu: warning: {sentence}"),
        (["run", "digits-small"], 2, f"fedemu: {sentence}"),
        (["device"], 2, f"fedemu: {sentence}"),
    ):
        with pytest.raises(SystemExit) as ended:
            commands.command(arguments, prog_name="fedemu")
        assert (ended.value.code or 0, capsys.readouterr().err) == (code, told)
