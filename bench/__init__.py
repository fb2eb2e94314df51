"""plait beside its peers on one piece of work, interleaved on one machine: `python -m bench`. No part of the wheel."""
