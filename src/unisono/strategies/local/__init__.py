"""Local steps: replicas that meet every few steps."""
