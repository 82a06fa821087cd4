"""The senses: a process beside the decision loop that does what takes time.

It reads the engines' metrics, asks how they are, listens to what they push, and knows which blocks of tokens they
hold. It decides nothing: what it sees goes to the decision process in small messages, over a socket that both
inherit. If it falls or hangs it is started again; until then decisions rest on our own accounting, visibly.

`process.py` is the process itself, `link.py` and `inbox.py` are its other end, in the decision loop.
"""
