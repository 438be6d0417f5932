"""The plan of a cluster, and its inputs: settings, model, machine and sizes."""
