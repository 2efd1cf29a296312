"""Our predictions compared with other people's numbers; each script prints the table it makes."""
