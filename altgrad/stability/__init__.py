"""How far a format and an arm stay stable: the largest learning rate, found by bisection over cells of the pipeline."""
