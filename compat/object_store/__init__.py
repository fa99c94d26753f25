"""An S3 server for tests and benchmarks, and a proxy before it that makes the network fail."""
