"""Blocks of KV: their owners, their search, their moves."""
