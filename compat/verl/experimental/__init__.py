"""verl's experimental programs that posttrain has."""
