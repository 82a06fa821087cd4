"""Who may call, and as whom: API keys, verified tokens, the word of a trusted hop."""
