"""Everything that is decided before anything runs: plain objects, no torch, no processes."""
