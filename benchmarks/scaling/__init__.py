"""Scaling of the parameter layer: a simulator of synchronous SGD calibrated on measurements.

Run it in the folder ``benchmarks``::

    python -m scaling calibrate              # measures this machine, some two minutes
    sudo python limited_links.py --quick --json scaling/links.json  # and exchanges over networks
    python -m scaling curves [--chart f.png] # to 1024 nodes, compared with published points

``curves`` fits the costs of the model to one part of the measured runs and predicts the other part.
If a prediction is off by more than 10 %, of an exchange over limited links by 15 %, it says so and
prints nothing else.

==================  ===========================================================================
:mod:`.model`       what a run is made of: costs, cluster, workload
:mod:`.stage`       the event loop: tasks that share cores, networks and the driver
:mod:`.policies`    which stages an iteration consists of
:mod:`.simulator`   iterations in a row
:mod:`.fitting`     least squares
:mod:`.calibrate`   measuring
:mod:`.validate`    from measured runs to costs, and whether they predict
:mod:`.links`       exchanges over limited links, and whether their costs predict
:mod:`.published`   published measurements, and the model of their cluster
:mod:`.report`      tables and a chart
==================  ===========================================================================
"""
