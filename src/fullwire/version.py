"""The version of this program: runs name the one that wrote them."""

__version__ = "0.1.0"
