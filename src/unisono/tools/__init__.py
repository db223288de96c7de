"""Commands that try, repeat, plan or check a training."""
