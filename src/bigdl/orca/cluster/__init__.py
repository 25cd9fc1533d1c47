"""How an engine is provisioned.

``spark.py`` describes the active Spark, ``launch.py`` starts and stops one, ``java.py`` finds the
Java that it runs on, and ``plan.py`` looks at query plans.  Only these modules look behind
PySpark's public API.
"""
