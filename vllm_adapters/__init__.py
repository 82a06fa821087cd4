"""Everything that knows vLLM: its metric names, its health, and a simulated engine."""
