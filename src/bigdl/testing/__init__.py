"""Contracts as tests: what engines, feeds and operators of other packages must do.

A package subclasses a contract, says what is to be tested, and runs the subclass by pytest. The
project's own suites are built on the same classes.
"""
