"""What went wrong: one sentence with the culprit, and a file with the evidence. See docs/debugging.md."""
