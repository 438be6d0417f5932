"""Start, watch, resize and stop a cluster: configuration, controller, node service."""
