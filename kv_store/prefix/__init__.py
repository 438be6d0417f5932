"""The read of a prefix: its plan, learned costs, and the causes of blocks that are computed."""
