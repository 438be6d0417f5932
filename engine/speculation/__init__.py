"""Speculation: guesses of the next tokens, which the model verifies; proposers, and drafts."""
