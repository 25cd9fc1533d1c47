"""How an engine is provisioned.

``spark.py`` starts, describes and stops Spark and is the only module that looks behind PySpark's
public API to do so; ``java.py`` finds the Java that Spark runs on.
"""
