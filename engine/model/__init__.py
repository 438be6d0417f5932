"""The model that an engine runs: the native decoder, its programs and its weights."""
