#!/bin/sh
# Written by unisono slurm; sbatch takes it as it is.
#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --array=1-3
#SBATCH --output=logs/%A-%a.txt
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300

# Slurm asks the job to end (time limit, preemption): the run ends at the end of its step, with a checkpoint.
asked=
trap 'asked=early' TERM

/venv/bin/python -P -m unisono run --run-dir "/data/my runs/\$a-$SLURM_JOB_ID" --resume auto --workers 2:8 -m package.train &
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
