"""The read of a prefix: its plan, sources and learned costs, and the causes of computed blocks."""
