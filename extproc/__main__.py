"""`python -m extproc` is `pointsman`."""

from extproc.cli import main

if __name__ == "__main__":
    main()
