"""The documentation site. `making/` holds the code that makes its generated pages."""
