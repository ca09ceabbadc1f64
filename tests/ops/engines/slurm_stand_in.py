"""Stand-ins for ``sbatch``, ``srun`` and ``scontrol``. Nodes are processes here. The words are a folder and a command.

The folder has a file ``job-ID.code`` when a job is over. A job that queues itself again is started again.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

HERE = Path(sys.argv[1])


def sbatch(script: str) -> int:
    text = Path(script).read_text()
    job = str(1000 + len(list(HERE.glob("job-*.script"))))
    (HERE / f"job-{job}.script").write_text(text)
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    output = re.search(r'^#SBATCH --output="(.*)"$', text, re.MULTILINE)
    assert nodes is not None
    assert output is not None
    environment = os.environ | {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": nodes[1], **_named(job)}
    with open(output[1].replace("%j", job), "ab") as log:
        keeper = [sys.executable, __file__, str(HERE), "keep", job]
        subprocess.Popen(keeper, env=environment, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {job}")
    return 0


def _named(job: str) -> dict[str, str]:
    """The variables by which the processes of a job are known. Other tests have jobs of the same number."""
    return {"SLURM_CLUSTER_NAME": str(HERE), "SLURM_JOB_ID": job}


def keep(job: str) -> int:
    """What slurmctld does: it starts the batch script, ends what is left of the job, and starts it again if asked."""
    restarts, again = 0, HERE / f"job-{job}.again"
    while True:
        environment = os.environ | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})
        batch = subprocess.Popen(["bash", str(HERE / f"job-{job}.script")], env=environment, start_new_session=True)
        (HERE / f"job-{job}.pid").write_text(str(batch.pid))
        code = batch.wait()
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and _named(job).items() <= process.environ().items():
                    process.kill()
                    process.wait(60)
            except psutil.Error:
                continue
        if not again.exists():
            (HERE / f"job-{job}.code.partial").write_text(str(code))
            (HERE / f"job-{job}.code.partial").rename(HERE / f"job-{job}.code")
            return 0
        again.unlink()
        restarts += 1


def srun(*words: str) -> int:
    assert "--ntasks-per-node=1" in words
    command = list(words[words.index("bash") :])
    count = os.environ["SLURM_NNODES"]
    tasks = [
        subprocess.Popen(
            command, env=os.environ | {"SLURM_PROCID": str(place), "SLURM_NTASKS": count}, start_new_session=True
        )
        for place in range(int(count))
    ]

    def forward(number: int, _: object) -> None:
        for task in tasks:
            os.killpg(task.pid, number)

    signal.signal(signal.SIGTERM, forward)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(*words: str) -> int:
    if words[0] == "show":
        print("node-1")
    else:
        assert words[0] == "requeue"
        (HERE / f"job-{words[1]}.again").touch()
    return 0


if __name__ == "__main__":
    command, words = sys.argv[2], sys.argv[3:]
    sys.exit({"sbatch": sbatch, "keep": keep, "srun": srun, "scontrol": scontrol}[command](*words))
