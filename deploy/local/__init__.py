"""Start and stop on this machine: state, secret, Redis, Ray's process, and the client of a running cluster."""
