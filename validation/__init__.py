"""Our predictions held against other people's numbers; each script prints the table it makes."""
