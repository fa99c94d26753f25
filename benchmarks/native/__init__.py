"""What is compiled of the benchmarks: the inner loop of the load generator (`load.pyx`, Linux)."""
