"""Paged attention and KV write: Triton kernels, and torch references of the same signatures."""
