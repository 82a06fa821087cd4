"""The senses: a process beside the decision loop that does what takes time.

It reads the engines' metrics, asks how they are, listens to what they push, and knows which blocks of tokens they
hold. It decides nothing: what it sees goes to the decision process in small messages, over a socket that both
inherit. If it falls or hangs it is started again; until then decisions rest on our own accounting, visibly.

`process.py` is the process itself: `watchers.py` asks engines, `push.py` and `kv_feed.py` listen to them, `prefix.py`
answers what they hold of a prompt. `link.py` and `inbox.py` are its other end, in the decision loop; `messages.py` is
what both speak, `targets.py` what is to be watched.
"""
