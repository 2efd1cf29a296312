"""The type in the middle: tables, typed facts, what a run has lost, and its directory."""
