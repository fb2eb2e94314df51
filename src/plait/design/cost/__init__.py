"""What a plan will cost, computed from the same objects that the runtime carries out."""
