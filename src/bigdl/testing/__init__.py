"""Contract tests for engines, feeds, operators and other extensions of BigDL.

A package subclasses a contract, names the tested object, and runs the subclass with pytest. The
test suites of this project use the same classes.
"""
