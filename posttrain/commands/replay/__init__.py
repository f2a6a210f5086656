"""`posttrain replay RUN STEP`: past updates made again, bit-for-bit."""
