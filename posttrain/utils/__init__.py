"""Front doors under names that other documents use."""
