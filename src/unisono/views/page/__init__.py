"""The web page of a run: its files, the answers to its questions, and a server for directories without a head."""
