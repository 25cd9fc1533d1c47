"""Operators of feature tables: one class per operator, one module per family.

Each operator has how it learns, its Spark plan and its Arrow function in one class. The code that
computes an Arrow batch also computes the single values of a row.
"""
