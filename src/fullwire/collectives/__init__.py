"""Collectives: how each is stated, its cost, and how it is played."""
