"""``python -m tilecast.cli``."""

from tilecast.cli.main import main

if __name__ == "__main__":
    main()
