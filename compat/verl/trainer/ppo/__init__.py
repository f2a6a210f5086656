"""verl's address of this part."""
