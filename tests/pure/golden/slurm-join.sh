#!/bin/sh
# Written by unisono slurm --join; sbatch takes it as it is.
#SBATCH --job-name=join-a
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --array=1-8
#SBATCH --output=join-a-%A_%a.out
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --signal=TERM@90

# One agent on each node. Its workers leave the run between two steps, when Slurm asks the job to end.
export SLURM_CPU_BIND=none
exec srun --ntasks-per-node=1 --no-kill --mem=0 /venv/bin/python -P -m unisono join /lab/ada/runs/a --run-dir /lab/ada/runs/a --wait 2m --workers 3
