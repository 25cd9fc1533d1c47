"""How an engine is provisioned.

``spark.py`` describes the active Spark, ``launch.py`` starts and stops one, ``java.py`` finds the
Java that it runs on, and ``plan.py`` looks at query plans.  Only these modules look behind
PySpark's public API.

For other machines, ``submit.py`` makes Spark's configuration and command from the arguments,
``address.py`` looks whether the cluster answers, ``environment.py`` ships the Python environment
and the program's modules, and ``provision.py`` does one after the other.  ``standalone.py`` starts
a cluster on this machine, which ``_keeper_main.py`` keeps.
"""
