"""The gRPC ports of a router, for clients and the operator, and bounds on arriving messages."""
