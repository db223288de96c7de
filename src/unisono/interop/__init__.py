"""Frameworks whose training loops Unisono can run: one module each, imported by the script that uses it."""
