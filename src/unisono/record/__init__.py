"""What happened in a run: events, the journal, and what readers make of them."""
