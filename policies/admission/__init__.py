"""When a request may go: the queue in front of a pool, tenants' quotas, breakers."""
