"""Start, watch, resize and stop a cluster: command line, configuration, controller, node service."""
