"""What a process counts and times: pure numbers for INFO, SLOWLOG and LATENCY."""
