"""Kubernetes: a run as objects of a cluster. `manifests` renders them, `kubectl` applies them."""
