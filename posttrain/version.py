"""The version of posttrain, for every part that writes it down."""

__version__ = "0.1.0"
