"""What each rank did at each moment, and the account of a step."""
