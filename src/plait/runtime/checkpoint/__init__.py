"""What a run keeps on disk, to go on from it in any layout."""
