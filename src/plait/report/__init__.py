"""Pictures drawn from the records: characters for a terminal, SVG for pages. No torch, no processes."""
