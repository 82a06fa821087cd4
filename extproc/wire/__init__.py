"""gRPC: what Envoy and we say to each other."""
