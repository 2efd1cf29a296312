"""One file an algorithm: its transfers, its formula where it has one, where it fits, its label."""
