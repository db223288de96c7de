"""Machines, processes and connections of a run."""
