"""The model that an engine runs: the native decoder, its weights, and the twin made of hashes."""
