#!/bin/sh
# Written by unisono slurm; sbatch takes it as it is.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --time=2:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --mem=100G
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --output=train-%j.out
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@90
#SBATCH --constraint=a100|h100
#SBATCH --mail-type=END

# Slurm asks the job to end (time limit, preemption): the run ends at the end of its step, with a checkpoint.
asked=
trap 'asked=early' TERM

/venv/bin/python -P -m unisono run --run-dir "runs/train-$SLURM_JOB_ID" --resume auto --threads 2 --strict train.py -- --lr 0.01 --name 'it'"'"'s $HOME' &
run=$!
trap 'asked=yes; kill -TERM "$run" 2>/dev/null' TERM
# A shell's child that is not yet the run would lose the signal: it gets a second for that.
[ "$asked" != early ] || { sleep 1; kill -TERM "$run" 2>/dev/null; }
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do
    wait "$run"
    code=$?
done

# The run is not finished: the job goes back into the queue, and resumes from the checkpoint, with the same bits.
if [ -n "$asked" ] && [ "$code" -ne 0 ]; then
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
