"""The tests: Fullwire's promises, as claims."""
