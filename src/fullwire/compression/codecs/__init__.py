"""One file a codec; each holds its `CODEC`."""
