"""What we tell Envoy ahead of time: generated configuration and xDS."""
