"""Ray actors: how the controller makes, probes and ends each one, and the node's service."""
