"""`posttrain view`: run directories in a browser, served from this machine alone."""
