"""The tests: what Fullwire promises, as claims."""
