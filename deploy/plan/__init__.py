"""The plan of a cluster: settings, model, machine and sizes that it follows from."""
