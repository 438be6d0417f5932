"""The step of an engine: its work, the order of its tokens, the rows that decode, and the run of the model."""
