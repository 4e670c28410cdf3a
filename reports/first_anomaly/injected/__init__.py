"""Runs with an injected fault, and how often the first anomalous tensor is the one with the fault.

    faults.Fault -> runs.trained -> score.named -> reports/first_anomaly

A test of `altgrad.metrics.first_anomaly` that takes minutes, so it is a command, `make injected`, whose results are
kept. They chose the thresholds of that module.
"""
