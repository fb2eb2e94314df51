"""One file a contestant: each sets itself up inside ranks that are already forked, and hands its step to its seat."""
