"""What every algorithm learns on the embedded task: runs side by side, their file, a table and a picture of gains."""
