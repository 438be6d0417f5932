"""Grammars of requests: matchers follow the tokens of choices, and mask the tokens that may not come next."""
