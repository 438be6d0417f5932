"""A model folder: its configuration, its tensors, where it comes from, and its fingerprint."""
