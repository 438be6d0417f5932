"""Blocks of KV: own them, find them, move them."""
