"""Recorded expert popularity, for made-up routes; see README.md for sources and licences."""
