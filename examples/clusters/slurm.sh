#!/bin/bash
# A Slurm job: sbatch slurm.sh train.py --its --options
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --signal=B:USR1@60

MUSTER_SECRET=$(openssl rand -hex 32)
export MUSTER_SECRET  # srun passes the environment on to every node

# 60 s before the time limit, Slurm sends SIGUSR1 to this shell. srun and muster run pass it on to the workers.
trap 'kill -USR1 $!' USR1
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" muster run --nproc-per-node 2 "$@" &
wait $!
status=$?
while kill -0 $! 2>/dev/null; do  # the signal ended the wait
  wait $!
  status=$?
done
exit $status
