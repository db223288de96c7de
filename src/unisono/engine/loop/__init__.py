"""What a training loop and a strategy share: the step and its settings."""
