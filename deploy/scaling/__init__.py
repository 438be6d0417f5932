"""Sizes of the pools that follow limits on latency."""
