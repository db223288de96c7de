"""The run's one server: membership, the store of ``torch.distributed``, status (``python -m unisono.cluster.head``)."""
