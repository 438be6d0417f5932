"""The gRPC ports of a router: clients, the operator, and bounds on what arrives."""
