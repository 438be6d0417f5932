"""Blocks between nodes: the port of a node's arena, and its readers."""
