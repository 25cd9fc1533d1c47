"""Operators of feature tables, one class for each, one module for each family.

An operator has how it learns, its plan of Spark, its work on an Arrow batch and on a single row
side by side.  What only tables of Spark do is a function of a DataFrame.
"""
