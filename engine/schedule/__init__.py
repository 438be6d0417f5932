"""The choice of the sequences that run in a step, and of how many tokens of each."""
