"""The read of a prefix: its plan, sources, learned costs, and the causes of blocks that are computed."""
