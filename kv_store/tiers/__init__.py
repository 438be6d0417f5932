"""Tiers outside of the node's memory: the protocol, its in-memory twin, and Redis."""
