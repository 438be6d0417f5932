"""The operator's view of a cluster: its status, and the contents of its tiers."""
