"""`python -m whorl.cli` is the same as the command `whorl`."""

from whorl.cli import main

if __name__ == "__main__":
    main()
