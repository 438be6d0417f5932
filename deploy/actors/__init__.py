"""Ray actors: the host that makes, probes and ends them for the controller, and the node's service."""
