"""Experiments that a user can repeat; each brings its own page."""
