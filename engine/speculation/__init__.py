"""Guesses of the next tokens, which the model verifies: proposers, and the drafts made of their guesses."""
