"""Collectives: how each is stated, what it costs, and how it is played."""
