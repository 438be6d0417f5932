"""The KV of one sequence: its block table, the rule by which KV stays in it, and the read of its prefix."""
