"""Tasks: choice, folders in the Harbor format, proofs, the filter by difficulty."""
