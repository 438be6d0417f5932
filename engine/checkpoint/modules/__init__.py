"""Architectures that transformers' own modules run, over this engine's pages and products."""
