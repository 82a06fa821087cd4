"""One module per form a trace comes in: a file's, or a generator's. readers.py chooses among them."""
