"""`python -m gputrain` is the `gputrain` command."""

from gputrain.cli.app import main

if __name__ == "__main__":
    main()
