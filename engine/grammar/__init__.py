"""Grammars of requests: their matchers follow the tokens of choices, and mask what may not come next."""
