"""Rolls: workers are replaced one by one, for other settings, another model folder or another release."""
