"""Attention over pages on a GPU, in Triton: decoding rows, chunks of prompts, and pages of int4."""
