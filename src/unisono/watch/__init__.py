"""What shows a run to people. Nothing here is asked by the training."""
