"""Runs with a planted fault, and how often the first cause that is named is the one that was planted.

    faults.Fault -> runs.trained -> score.scored -> reports/first_cause

A command that nothing imports: it trains, which no diagnosis may.
"""
