"""`posttrain replay RUN STEP`: past updates made again, to the bit."""
