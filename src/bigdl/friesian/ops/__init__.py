"""Operators of feature tables, one class for each, one module for each family.

An operator has how it learns, its plan of Spark and its work on an Arrow batch side by side; a
single row is a batch of one.  What only tables of Spark do is a function of a DataFrame.
"""
