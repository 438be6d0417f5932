"""The pages of a sequence: its block table, and the rule by which KV stays in them."""
