"""Recipes that prepare data sets, as rows and as files."""
