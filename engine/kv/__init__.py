"""The KV of a sequence: its block table, its retention, and the read of its prefix."""
