"""A run's state on disk: the files, how members write them together, how they are read back."""
