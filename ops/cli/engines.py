"""The commands that hand a run to an engine, which places its machines on a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import overrides_of
from fedemu.ops.data.apart import find_data
from fedemu.ops.engines import kubernetes as cluster
from fedemu.ops.engines.places import patient, require_no_edges, require_processes
from fedemu.ops.engines.slurm import SlurmJob, explained, submit, write_job
from fedemu.ops.experiment.runtime import MOST_NODES, MOST_TRAINERS
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.running.codes import leaving_at_once
from fedemu.ops.running.folder import claim, give_back
from fedemu.ops.running.together import require_metrics_ports
from fedemu.ops.terminal import say
from fedemu.ops.track.kinds import check as check_trackers


@guarded
def slurm(
    experiment: options.Experiment = None,
    nodes: Annotated[
        int,
        typer.Option(
            metavar="N", help="The number of nodes. The devices are divided among them.", min=1, max=MOST_NODES
        ),
    ] = 2,
    time: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="The time limit, as in 90 (minutes), 4:00:00 or 2-12:00:00. The job queues itself again before.",
        ),
    ] = "4:00:00",
    cpus: Annotated[
        int | None,
        typer.Option(
            "--cpus-per-node",
            metavar="C",
            help="The cores of each node, one trainer for each. Default: whole nodes.",
            min=1,
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus-per-node",
            metavar="G",
            help="The GPUs of each node, one trainer for each.",
            min=1,
            show_default=False,
        ),
    ] = None,
    partition: Annotated[
        str, typer.Option(metavar="NAME", help="The partition of the cluster.", show_default=False)
    ] = "",
    account: Annotated[str, typer.Option(metavar="NAME", help="Who pays for the job.", show_default=False)] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="One more option of sbatch, as in --sbatch=--constraint=gpu80. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    submit_it: Annotated[bool, typer.Option("--submit", help="Also submit the job.")] = False,
    out: options.Out = None,
    seed: options.Seed = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    settings: options.Settings = None,
    per_process: options.PerProcess = None,
    device_type: options.DeviceTypeOption = None,
) -> int:
    """Write the batch script of a run on several nodes into a new run directory, and explain it.

    Every node must see this folder and this installation of fedemu. Submitting the script again continues the run.
    """
    overrides = overrides_of(
        settings,
        seed=seed,
        rounds=rounds,
        fleet__devices=devices,
        runtime__per_process=per_process,
        runtime__device_type=device_type,
    )
    without_effect = WithoutEffect()
    checked, runtime = patient(*load_experiment(experiment, overrides, os.environ, without_effect))
    job = SlurmJob(
        nodes=nodes,
        time=time,
        cpus=cpus or 0,
        gpus=gpus or 0,
        partition=partition,
        account=account,
        options=sbatch or (),
    )
    require_no_edges(checked, "fedemu slurm")
    require_processes(runtime, "fedemu slurm")
    job.check(checked, out)
    require_metrics_ports(runtime)
    check_trackers(runtime.track.to, runtime.track.out)
    find_data(checked)
    directory = claim(checked, out)
    try:
        script = write_job(directory, checked, runtime, job)
        without_effect.tell(say)
        say(explained(directory, checked, job))
        if submit_it:
            print(submit(script))
    except Exception:
        give_back(directory)
        raise
    return 0


@guarded
def kubernetes(
    experiment: options.Experiment = None,
    machines: Annotated[
        int,
        typer.Option(
            metavar="N", help="The number of machines. The devices are divided among them.", min=1, max=MOST_NODES
        ),
    ] = 2,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The folder to make. Default: kubernetes-NAME.", show_default=False),
    ] = None,
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="The name of all objects. Default: the experiment's.", show_default=False),
    ] = "",
    image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            help="The image with fedemu. Default: fedemu:VERSION, as docs/clusters.md builds it.",
            show_default=False,
        ),
    ] = "",
    cpus: Annotated[
        int,
        typer.Option(metavar="C", help="The cores of each machine, one trainer for each.", min=1, max=MOST_TRAINERS),
    ] = 2,
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="G",
            help="The GPUs of each machine, one trainer for each.",
            min=1,
            max=MOST_TRAINERS,
            show_default=False,
        ),
    ] = None,
    storage: Annotated[str, typer.Option(metavar="SIZE", help="The size of the coordinator's volume.")] = "10Gi",
    machine_storage: Annotated[
        str, typer.Option(metavar="SIZE", help="The size of each machine's volume, for its devices' own states.")
    ] = "2Gi",
    data: Annotated[
        str,
        typer.Option(
            metavar="CLAIM", help="A claim of a volume with data sets, which many pods can read.", show_default=False
        ),
    ] = "",
    seed: options.Seed = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    settings: options.Settings = None,
    per_process: options.PerProcess = None,
) -> int:
    """Write the manifests of a run on Kubernetes into a folder for `kubectl apply`, and its keys beside them.

    A StatefulSet is the coordinator, and its volume has the run directory. Another one has the machines; the volume of
    each has its lease and its devices' own states.
    """
    overrides = overrides_of(
        settings, seed=seed, rounds=rounds, fleet__devices=devices, runtime__per_process=per_process
    )
    without_effect = WithoutEffect()
    checked, runtime = patient(*load_experiment(experiment, overrides, os.environ, without_effect))
    pods = cluster.Pods(
        name=name or cluster.name_of(checked),
        machines=machines,
        image=image or cluster.image_of_this_version(),
        cpus=cpus,
        gpus=gpus or 0,
        storage=storage,
        state=machine_storage,
        data=data,
    )
    require_no_edges(checked, "fedemu kubernetes")
    require_processes(runtime, "fedemu kubernetes")
    pods.check(checked)
    folder = out or Path(f"kubernetes-{pods.name}")
    with leaving_at_once():
        from fedemu.ops.engines.memory import needed

    cluster.write_manifests(folder, checked, runtime, pods, needed(checked, runtime, pods, say))
    without_effect.tell(say)
    say(cluster.explained(folder, checked, pods))
    return 0
