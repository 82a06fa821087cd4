"""The doers around policies.lifecycle: discovery, probes, scrapes."""
