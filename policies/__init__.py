"""The brain: deterministic state machines without I/O. The clock and randomness are arguments."""
