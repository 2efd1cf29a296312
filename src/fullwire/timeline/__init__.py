"""The timeline of each rank, moment by moment, and the account of a step."""
