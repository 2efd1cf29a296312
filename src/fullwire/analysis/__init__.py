"""What happened: a Run in, plain result values out."""
