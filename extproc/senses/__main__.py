"""`python -m extproc.senses SOCKET BUFFER_BYTES LOG_LEVEL LOG_FORMAT`: started by link.py, not by people."""

import os
import signal
import sys

import uvloop

from extproc.observe.logging import configure_logging
from extproc.senses.process import run

if __name__ == "__main__":
    descriptor, buffer_bytes, level, form = sys.argv[1:]
    configure_logging(level, form)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C on the terminal is for those who stop us in order
    uvloop.run(run(int(descriptor), int(buffer_bytes)))
    sys.stdout.flush()
    sys.stderr.flush()
    # else the interpreter would wait for its threads, and one may be in a chat template that does not end
    os._exit(0)
