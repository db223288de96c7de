"""The machine and its processes: one outside thing each."""
