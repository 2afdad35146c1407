"""``python -m tilecast.cli``."""

from tilecast.cli import main

if __name__ == "__main__":
    main()
