"""The machine: what it is, how fast its parts are, and what will hold a user back."""
