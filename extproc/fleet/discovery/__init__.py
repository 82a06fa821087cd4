"""Where endpoints come from. `sources.py` follows every pool's source; each kind of source has a module of its own."""
