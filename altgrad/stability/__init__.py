"""The largest stable learning rate of a format and an optimizer, by bisection over cells of the pipeline."""
