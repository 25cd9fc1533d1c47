"""Operators of feature tables, one class for each, one module for each family.

An operator has how it learns, its plan of Spark and its work on an Arrow batch side by side; what
computes a batch computes the single values of a row too.
"""
