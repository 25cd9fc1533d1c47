"""Setup and description of Spark and Ray clusters.

``spark.py`` describes the active Spark, ``launch.py`` starts and stops Spark, ``java.py`` finds its
Java, and ``plan.py`` inspects query plans.  For other machines, ``submit.py`` creates Spark's
configuration and command from the arguments, ``environment.py`` sends the Python environment and
the program's modules, and ``standalone.py`` starts a cluster on this machine.  ``ray.py`` describes
the active Ray, which ``ray_launch.py`` starts on this machine or on Spark's executors.
``supervisor.py`` stops started processes when this process exits.

Only these modules use private interfaces of PySpark and Ray.
"""
