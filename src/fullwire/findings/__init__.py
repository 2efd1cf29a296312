"""What can be found: one record for each kind, with its rule, its label and its sentence."""
