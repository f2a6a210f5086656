"""Recipes that make data sets, as rows and as files."""
