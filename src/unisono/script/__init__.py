"""The script's side of a run: `Run`, its loops, and what they call."""
