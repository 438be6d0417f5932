"""The common parts of both roles of worker: loop, service, line, gRPC server, Ray actor."""
