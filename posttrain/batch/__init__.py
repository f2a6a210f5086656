"""`DataProto`, the batch that flows between the stages: its rows, its named fields, and how it is saved."""
