"""The reward model: conversations as it reads them, and their scores."""
