"""The parts that both roles of worker share: loop, service, line, gRPC server, Ray actor."""
