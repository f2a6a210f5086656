"""The tool `search`: passages for a query, from a local index or from a retrieval server."""
