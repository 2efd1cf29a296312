"""Gradient compressors: the bytes that they leave on the wire, and their costs."""
