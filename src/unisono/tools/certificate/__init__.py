"""Certificates: what a run says of itself so that others can check it, and the check."""
