"""What a server says of itself: Prometheus' metrics, and a line of throughput in the log."""
