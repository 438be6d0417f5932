"""What both roles of worker share: loop, service, gRPC skin, Ray skin."""
