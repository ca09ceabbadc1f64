"""How soon the rounds of a run go on after one of its processes was killed."""
