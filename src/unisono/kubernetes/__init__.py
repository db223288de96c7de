"""Kubernetes: a run as objects of a cluster. `manifests` renders them, `text` writes them, `client` applies them."""
