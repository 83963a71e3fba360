"""Parts that the benchmark tools share."""
