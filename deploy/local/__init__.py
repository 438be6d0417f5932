"""Start and stop on this machine: state, secret, Redis, the process of Ray, and the client of a running cluster."""
