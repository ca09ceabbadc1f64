#!/bin/bash
# @TITLE@, on @NODES@ of a cluster with Slurm.
# `fedemu slurm` has written this script; `sbatch @SCRIPT@` submits it. You may change it.
#
# The first node runs the coordinator. Each node, the first one too, runs a supervisor with its part of the devices.
# Slurm places them and starts them again. All that is known of the run is in its run directory, which every node must
# see: if this job ends early and is started again, the run goes on from its checkpoint, and its result is the same.
@OPTIONS@
# Slurm tells this script @NOTICE@ seconds before the time limit; it stops the run with a checkpoint and queues itself again.
#SBATCH --signal=B:USR1@@NOTICE@
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@LOG@

# If fedemu needs modules of your cluster, load them here, as in: module load cuda

cd @FOLDER@ || exit
@VARIABLES@
export python=@PYTHON@ run=@RUN@ devices=@DEVICES@
export keys="$run/keys"
job="job ${SLURM_JOB_ID:?submit this script with sbatch}"

# The address can be reached by other machines, so both sides need keys. The secret ones are for your eyes only.
key() { [ -e "$1/machine.key" ] || said=$("$python" -m fedemu keys new --keys "$1" 2>&1) || { echo "$said" >&2; false; }; }
key "$keys" || exit

# 1. The coordinator. It takes any free port, so two jobs on one node do not meet, and writes it into a file.
rm -f "$run/address"
"$python" -m fedemu coordinator --resume "$run" --bind "tcp://${LISTEN:-0.0.0.0}:0" --keys "$keys" &
coordinator=$!
stopping=
trap 'stopping=soon; kill -TERM $coordinator' USR1
trap 'stopping=now; kill -TERM $coordinator' TERM INT
lives() { kill -0 "$1" 2>/dev/null; }
while lives $coordinator && [ ! -s "$run/address" ]; do sleep 1; done

# 2. A supervisor on each node. Its number in the job names its key and its folder, on whatever node it is.
node() {
    place=$SLURM_PROCID
    count=$((devices / SLURM_NTASKS + (place < devices % SLURM_NTASKS)))
    own=$keys/node-$place
    key "$own" || exit
    "$python" -m fedemu keys approve "node-$place" "$own/machine.key" --keys "$keys" >/dev/null || exit
    for _ in 1 2 3 4 5 6; do
        "$python" -m fedemu device --n $count --connect "$address" --keys "$own" --server-key "$keys/machine.key" \
            --state "$run/devices/$place"@METRICS@@ALLOWED@
        code=$?
        if [ $code -le 128 ]; then exit $code; fi # above 128 a signal has killed it
        echo "the supervisor of place $place was killed on $(hostname); starting it again" >&2
    done
    exit $code
}
if lives $coordinator; then
    # The address is known since the coordinator listens. If that is at all addresses, nodes look for the first one's name.
    address=$(cat "$run/address")
    case ${LISTEN:-0.0.0.0} in
    0.0.0.0 | '*' | '[::]') address=tcp://$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${address##*:} ;;
    esac
    export address
    export -f key node
    srun --ntasks-per-node=1 --cpu-bind=none bash -c node &
    nodes=$!
    while lives $coordinator && lives $nodes; do wait -n $coordinator $nodes; done
    if lives $coordinator && ! wait $nodes && [ -z "$stopping" ]; then
        echo "$job: the supervisors have ended early; stopping the coordinator with a checkpoint" >&2
        kill -TERM $coordinator
    fi
fi

# 3. The end.
while lives $coordinator; do wait $coordinator; done
wait $coordinator
code=$?
if [ -n "${nodes:-}" ]; then
    # They leave by themselves, unless the coordinator was killed and could not tell them.
    for _ in $(seq 30); do if [ $code -le 128 ] && lives $nodes; then sleep 1; fi; done
    kill -TERM $nodes 2>/dev/null
    wait $nodes
    lost=$?
fi
if { [ "$stopping" = soon ] && [ $code = 4 ]; } || { [ $code -gt 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; }; then
    echo "$job: not done yet; it goes on when Slurm starts it again" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
# If the supervisors have stopped the run, their code says why.
if [ $code = 4 ] && [ -z "$stopping" ] && [ "${lost:-0}" != 0 ]; then code=$lost; fi
exit $code
