"""Finds the largest stable learning rate of each format and optimizer by bisection over training runs."""
