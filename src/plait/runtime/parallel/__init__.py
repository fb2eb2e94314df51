"""One parallel method per file; siblings never import each other. training/assemble.py introduces them."""
