"""`pointsman demo`: the same conversations over simulated engines, once in turn and once by placement.

Not a benchmark of hardware: the engines are simulated, and the figures are about where requests went.
"""
