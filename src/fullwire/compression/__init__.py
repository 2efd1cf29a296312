"""Gradient compressors: what they leave on the wire, and what they cost."""
