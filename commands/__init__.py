"""Groups of commands that cli.py adds to its own, and the terminal they share."""
