"""What is true: frozen values and their arithmetic. No files, no torch, no clock."""
