"""Speed, as ratios beside a peer in the same run on the same machine. `make bench`; results in results.json."""
