"""A simulated vLLM: a pure engine model in virtual time, and an HTTP server with its surface."""
