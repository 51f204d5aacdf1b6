#!/bin/bash
# The paper's tables and figures on a Slurm cluster: a Ray cluster for as long as one job lasts, a node per `ray start`.
#
#   fedsieve data fetch cifar10        # once; the nodes need not see it, but for the first
#   sbatch examples/cluster/slurm.sh   # from a folder that all nodes share; results go to runs/paper there
#
# Submitted again, it makes only what is missing, so a job that ran out of time is no loss. Needs Ray 2.52 or newer.

#SBATCH --job-name=fedsieve
#SBATCH --nodes=4                # change: nodes, and what each of them gives
#SBATCH --ntasks-per-node=1      # one Ray per node
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1        # 0 to train on CPU cores; some clusters want --gres=gpu:1
#SBATCH --exclusive              # Ray shares a node badly with another job's Ray
#SBATCH --no-kill                # go on when a node fails: its clients or runs are trained again elsewhere
#SBATCH --time=12:00:00
#SBATCH --output=fedsieve-%j.log

set -euo pipefail

# change: what makes `fedsieve` and `ray` known on every node (module load ..., conda activate ...)
source "${FEDSIEVE_VENV:-.venv}/bin/activate"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# on NODE COMMAND...: only ever in a subshell, which becomes the srun
on() { exec srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$@"; }

# The address at which other nodes reach the first. Change it if they should talk over another interface.
ip=$(on "${nodes[0]}" hostname --ip-address | tr ' ' '\n' | awk '!/^127\.|:/ && !found++')
: "${ip:?the name of the first node leads to no address but loopback}"
export RAY_ADDRESS="$ip:$((20000 + SLURM_JOB_ID % 10000))" # what `--address auto` means from here on

# Other users of the cluster's network can reach these ports: they also need this secret, which no file holds.
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

resources=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
quiet=(--disable-usage-stats --temp-dir="/tmp/ray-$SLURM_JOB_ID" --block)

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT # `ray start --block` takes its node down with it

echo "Ray head on ${nodes[0]}, $RAY_ADDRESS"
on "${nodes[0]}" env -u RAY_ADDRESS ray start --head --node-ip-address="$ip" --port="${RAY_ADDRESS##*:}" \
    --include-dashboard=false "${resources[@]}" "${quiet[@]}" &
for node in "${nodes[@]:1}"; do # a step for each, so that one that fails ends no other
    on "$node" ray start --address="$RAY_ADDRESS" "${resources[@]}" "${quiet[@]}" &
done

timeout 300 python - "${#nodes[@]}" <<'WAIT' || { echo "not all nodes came up in five minutes" >&2; exit 1; }
import sys
import time

import ray

while True:
    try:
        ray.init("auto", log_to_driver=False, logging_level="error")
        break
    except (ConnectionError, RuntimeError):  # the head is not there yet
        time.sleep(2)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(2)
print("Ray has", ray.cluster_resources(), flush=True)
WAIT

fedsieve reproduce all --engine ray --address auto --out runs/paper
