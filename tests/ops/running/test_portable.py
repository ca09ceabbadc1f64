"""``compute.portable``: what it sets, what it refuses, and the digests that every processor has to reproduce."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.coordinator.record.summary import machine, versions
from fedemu.device.compute import environment
from fedemu.device.compute.environment import PORTABLE_ENVIRONMENT, hold_to_portable, lacking
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.running import portable
from fedemu.ops.running.device_code import ways
from fedemu.ops.running.launch import child_command
from fedemu.ops.running.portable import environment_for, start_again_portably
from fedemu.ops.running.words import is_complete
from fedemu.protocol.errors import ConfigurationError

PORTABLE = Experiment.parse({"compute": {"portable": True}})
DIGESTS = {
    "fedavg": "e0060986442c265d371888dcd89bdc5987489c67e0ef3770c05978d3da9a6764",
    "fedntd": "4ecf4719710dd63ea3411ba412fa4cb145d7cf36f686a4f173ffc1aa02bcda06",
    "flashback": "90fec5f21ae8e6a96521b27b1dd3c2625139c134d40d813c5c9fa6941af78d03",
    "moon": "82bf1d48941409b0466709d3073b17773ba4c08b457830a95a18411b97ae53eb",
    "scaffold": "aa87c1e7a2ae23186fb24a1d2cc7295d8ed97088a5baf7d5bc9992e56670d969",
}
"""Model digests by method, with torch 2.13.0 and numpy 2.4.6. Seen on an Intel Xeon with AVX-512 and AMX, and the same
on an AMD EPYC with AVX2 (family 25, model 1)."""
SPECTRA = "d1c4240e755c19bcee71a824366ad2bf90b79a23779ad84a4b5658b3bc3e2ac5"
"""The digest of a convolution by spectra and its gradients. Seen on AMD EPYCs (family 25, models 1 and 17), and on an
Intel Haswell that QEMU 7.2 emulated."""
RUNS = """
import hashlib
import sys
from pathlib import Path
import numpy as np
import torch
from fedemu.algorithms.models import spectral
from fedemu.coordinator.record.run import read_summary
from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.coordinator import coordinate
from fedemu.ops.running.folder import claim
SHORT = ["compute.portable=true", "rounds=2", "fleet.devices=6", "fleet.per_round=3", "local.epochs=2"]
METHODS = {
    "fedavg": ["local.momentum=0.9", "local.weight_decay=1e-4"],
    "fedntd": ["algorithm.name=fedntd", "model={name='cnn'}", "local.epochs=1"],
    "flashback": ["algorithm.name=flashback", "data.public.fraction=0.1", "algorithm.options.server_epochs=2"],
    "moon": ["algorithm.name=moon"],
    "scaffold": ["algorithm.name=scaffold", "local.momentum=0.5"],
}
for name, settings in METHODS.items():
    experiment, _ = load_experiment("digits-small", [*SHORT, *settings], {})
    folder = claim(experiment, Path(sys.argv[1]) / name)
    coordinate(folder, experiment, Runtime(transport="memory", report=False), lambda address: None)
    print(name, read_summary(folder)["model_digest"])
draws = np.random.Generator(np.random.Philox(0))
x, weight, factor = (
    torch.from_numpy(draws.random(shape, np.float32)).requires_grad_()
    for shape in ((20, 32, 16, 16), (64, 32, 5, 5), (20, 64, 16, 16))
)
assert spectral.suits(x, weight, 1)
made = spectral.convolve(x, weight, 2)
results = made, *torch.autograd.grad((made * factor).sum(), (x, weight))
print("spectra", hashlib.sha256(b"".join(leaf.detach().numpy().tobytes() for leaf in results)).hexdigest())
"""


def has_avx2() -> bool:
    return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def test_five_methods_and_spectra_have_the_same_bits_on_every_processor(tmp_path: Path) -> None:
    if not has_avx2():
        pytest.skip("compute.portable is for processors with AVX2")
    done = subprocess.run(
        [sys.executable, "-c", RUNS, str(tmp_path)],
        env=os.environ | PORTABLE_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.split() for line in done.stdout.splitlines())
    expected = DIGESTS | {"spectra": SPECTRA}
    differing = sorted(name for name in expected if found[name] != expected[name])
    refuted = (
        f"with compute.portable = true, {', '.join(differing)} gave other bits than on an Intel Xeon and an AMD EPYC. "
        f"This is a {machine()['processor']} with {versions()}. With the same versions of torch and numpy, find the "
        "operation that differs, and pin it in device/compute/environment.py; with others, write the new digests."
    )
    assert not differing, refuted


def test_the_variables_are_those_of_portable_experiments_only() -> None:
    assert environment_for(Experiment()) == ways(Experiment().to_bytes()).environment == {}
    assert ways(PORTABLE.to_bytes()).environment == environment_for(PORTABLE) == PORTABLE_ENVIRONMENT
    assert lacking(PORTABLE_ENVIRONMENT, PORTABLE_ENVIRONMENT) == {}
    assert lacking({**PORTABLE_ENVIRONMENT, "MKL_CBWR": "AVX512"}, PORTABLE_ENVIRONMENT) == {"MKL_CBWR": "COMPATIBLE"}


def test_a_command_that_computes_starts_again_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(portable.os, "execve", lambda path, command, env: started.append(env))
    for name in PORTABLE_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    start_again_portably(Experiment())
    assert started == []
    start_again_portably(PORTABLE)
    assert lacking(started[0], PORTABLE_ENVIRONMENT) == {}
    for name, value in PORTABLE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    start_again_portably(PORTABLE)
    assert len(started) == 1


def test_what_cannot_be_portable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"device_type is cuda; choose cpu"):
        hold_to_portable("cuda")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with pytest.raises(ConfigurationError, match=r"needs ONEDNN_MAX_CPU_ISA=AVX2|needs MKL_CBWR=COMPATIBLE"):
        hold_to_portable("auto")
    for name, value in PORTABLE_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(
        ConfigurationError, match=r"needs an x86-64 processor with AVX2, and torch computes with DEFAUL"
    ):
        hold_to_portable("auto")
    with pytest.raises(ConfigurationError, match=r"computes with one thread, and server\.threads = 2"):
        Experiment.parse({"compute": {"portable": True}, "server": {"threads": 2}})


@pytest.mark.parametrize("flags", ["fpu sse4_2 avx", "fpu avx2", "fpu fma"])
def test_a_processor_without_avx2_is_refused_before_a_library_uses_it(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "processor", lambda: {"vendor_id": "AuthenticAMD", "flags": flags})
    assert environment_for(Experiment()) == {}
    for refused in (
        lambda: environment_for(PORTABLE),
        lambda: start_again_portably(PORTABLE),
        lambda: ways(PORTABLE.to_bytes()),
        lambda: hold_to_portable("cpu"),
    ):
        with pytest.raises(ConfigurationError, match=r"needs an x86-64 processor with AVX2, and that of this machine"):
            refused()
    for told in ({}, {"flags": "fpu avx2 fma"}):
        monkeypatch.setattr(environment, "processor", lambda told=told: told)
        assert environment_for(PORTABLE) == PORTABLE_ENVIRONMENT


@pytest.mark.skipif(not has_avx2(), reason="compute.portable is for processors with AVX2")
def test_a_run_of_a_sweep_starts_again_with_its_own_words(tmp_path: Path) -> None:
    words = ["run", "digits-small", "--rounds", "1", "--out", str(tmp_path / "run"), "--transport", "memory"]
    settings = ["--set", "compute.portable=true", "--set", "runtime.report=false"]
    command = child_command("fedemu-run", "fedemu.ops.cli.__main__", *words, *settings)
    lacking_all = {name: value for name, value in os.environ.items() if name not in PORTABLE_ENVIRONMENT}
    ended = subprocess.run(command, env=lacking_all, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, is_complete(tmp_path / "run", read_frozen(tmp_path / "run"))) == (0, True), ended.stderr
