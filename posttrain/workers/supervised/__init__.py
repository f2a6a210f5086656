"""Workers of supervised training: rows with given answers, one optimizer step per batch."""
