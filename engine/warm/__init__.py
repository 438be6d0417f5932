"""The warming of a model before it serves."""
