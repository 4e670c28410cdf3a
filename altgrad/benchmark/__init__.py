"""How fast a training step is, beside an unquantized one and the limits of the machine: ``make bench``."""
