"""Tiers outside of the node's memory: the protocol, Redis, and files."""
