"""What runs on each machine: the agent, the nursery that forks its workers, a worker's process."""
