"""The decision which sequences run in a step, and how many tokens of each."""
