"""Every time limit of the library, in seconds, with its reason.

A limit stands beside those that it depends on; :data:`ORDERS` has the chains whose order must stay.
What is named ``LOOK`` is the time between two looks at something, which costs little.  Limits that
a user may set are the defaults of arguments.

The supervisor of Spark's daemons and Ray's nodes runs as a script without this package, and has
limits of its own (:mod:`bigdl.orca.cluster.supervisor`).
"""

# -- the driver and the workers of a job ----------------------------------------------------------

DRIVER_LOOK_S = 0.05  # between two looks of the driver at the calls of its workers
HEARTBEAT_S = 0.5  # between two heartbeats of a worker, which carry its progress and its lines
PARENT_LOOK_S = 0.2  # between two looks of a worker at its parent, which may be gone
CONNECTION_TURN_S = (
    1.0  # after which one who waits lets other threads of the worker use the connection
)
CAUSE_S = 1.0  # that a worker whose peer went away waits for the cause, which another worker knows
# That the clean-up after an error, such as the end of a process group, may hold it up.
CLEAN_UP_S = 1.0
ERROR_GRACE_S = 1.0  # that workers get to end by themselves after the first error
LOSS_NOTICE_S = 2.0  # that survivors get to notice that a peer went away, and to say the cause
STAGE_LEAVE_S = 3.0  # that survivors of a failed stage get to leave it
WORKERS_END_S = 5.0  # that workers get to end when they are told to
VOTE_S = 1.0  # between two votes of a fit on leaving a machine that goes

WORKER_CONNECT_S = 5.0  # in which a worker must be able to open a connection to the driver
HANDSHAKE_S = 10.0  # in which a connection must prove itself; one that does not takes a place
STORE_REQUEST_S = 60.0  # that a question to the driver's store may wait for its answer
GREETING_S = 120.0  # in which the driver greets a worker: one that is busy greets late
TUNNEL_OPEN_S = 60.0  # in which an encrypted tunnel between two workers must be open
# That a collective may take: a worker may compile, read or evaluate longer than the others.
COLLECTIVE_S = 1800.0
# In which all workers must join, and others must come for those that are lost.
WORKERS_JOIN_S = 120.0

# -- processes of this machine --------------------------------------------------------------------

LAUNCH_LOOK_S = 0.1  # between two looks at processes that say nothing
LOCAL_EXIT_S = 2.0  # that a process gets to end once it has hung up
POOL_GRACE_S = 2.0  # that a worker of a pool has to end by itself
OUTPUT_DRAIN_S = 2.0  # to pass on the last output of a process, which another one may hold open
KERNEL_KILL_S = 2.0  # that the kernel has to end a process that it was told to kill
PYTHON_ANSWER_S = 20.0  # in which another Python has to answer
LAUNCH_GRACE_S = 5.0  # from SIGTERM to SIGKILL
CLOCK_STEP_S = 2.0  # by which a clock that is set moves the start of a process
STUDY_LOCK_S = 120.0  # that a process waits while others write to the same SQLite file of a study

# -- engines --------------------------------------------------------------------------------------

# That the other workers get to end by themselves after an error, where rank 0 has the store.
RANK0_LEAVE_S = 1.0
DYNAMIC_WORKERS_NOTICE_S = (
    1.0  # in which the workers of a gang notice by themselves that one is gone
)
DEPARTURES_LOOK_S = 1.0  # between two questions about executors that go
DYNAMIC_WORKERS_LOG_S = 10.0  # after which it is said that workers are waited for
INTERRUPT_LOOK_S = 0.1  # in which Ctrl-C is seen while Ray works
ACTOR_PLACE_S = 60.0  # that an actor which was just made is waited for, on a busy machine too
ACTOR_START_S = 120.0  # in which the process of an actor must be up
NODE_LOSS_S = 30.0  # in which Ray must notice that a node is gone
TRIAL_FAILURE_S = 30.0  # in which the failure of one worker of a trial must reach the others
CONNECT_SERVER_LOOK_S = 5.0  # between two looks for a server of Spark Connect that does not answer
CONNECT_SERVER_S = 30.0  # without a server of Spark Connect, after which it is given up
STORE_LOOK_S = 0.1  # between two looks at the key-value store of MXNet
STORE_END_S = 30.0  # that the store of MXNet gets to end after its workers

# -- clusters -------------------------------------------------------------------------------------

# In which a task of Spark Connect must be able to open a connection to this process.
TASK_CONNECT_S = 2.0
CLUSTER_PROBE_S = 3.0  # in which a cluster must accept a connection
FAILED_TASKS_S = 0.2  # in which Spark logs that the tasks of a failed stage ended
TASKS_LOOK_S = 0.5  # between two looks for tasks that failed
SPARK_ANSWER_S = 2.0  # that a remote server of Spark gets to answer
SPARK_CANCEL_S = 10.0  # that a cancelled job of Spark gets to end
JVM_LOOK_S = 1.0  # between two looks at the JVM
JVM_BROKEN_S = 3.0  # that a JVM has to end after its connections broke
JVM_EXIT_S = 10.0  # that a JVM has to end by itself before it is killed
JVM_STOPPED_S = 30.0  # after which the program is told that its JVM was stopped
JVM_STOP_S = 60.0  # that a JVM has to stop its context before it is killed
EXECUTORS_LOOK_S = 5.0  # between two looks at the pods of executors that do not register
EXECUTORS_S = 120.0  # that executors get to register, or to come back
PODS_LOOK_S = 0.5  # between two looks at pods
POD_LOST_S = 10.0  # after the end of a pod, in which its node must say that it has ended
# With a pod that has no node, or with no pod at all; a cluster that adds nodes needs more.
POD_PLACE_S = 60.0
PODS_START_S = 600.0  # in which executors must start; an image may have to be pulled
YARN_LOGS_S = 60.0  # in which YARN collects the logs of a program that has ended
RAY_LOOK_S = 0.5  # between two looks at the processes of Ray
RAY_ANSWER_S = 10.0  # in which Ray's head must answer
# That Ray gets to leave this process: more than a supervisor has to end what it runs.
RAY_SHUTDOWN_S = 25.0
RAY_START_S = 120.0  # in which all nodes of Ray must have joined

# -- storage and other services -------------------------------------------------------------------

BROKER_PAUSE_S = 0.5  # between two calls of a broker of Kafka that failed
BROKER_CALL_S = 10.0  # that one call of a broker may take
SINK_CALL_S = 30.0  # that a broker may take to confirm records
BROKER_S = 120.0  # that a broker is waited for, which may be restarting
SOURCE_POLL_S = 1.0  # that one poll for records may wait
NAME_NODE_S = 120.0  # that a call waits for a name node of HDFS; one that restarts takes about 40

WRITER_LOCK_S = 3600.0  # after which the lock of a writer to Redis that died is free

# -- servers of models and recommenders -----------------------------------------------------------

SERVING_HEARTBEAT_S = (
    1.0  # between two signs of life of a serving worker, and between two looks for them
)
WORKER_PAUSE_S = 1.0  # before another serving worker for one that did not live longer
SIBLING_ANSWER_S = 2.0  # that another serving worker has to answer
REPLICA_AWAY_S = 0.5  # for which a replica of a shard that failed is asked last
# Without a sign of life after which a worker is replaced: more than any call keeps the interpreter
# for itself, or a busy machine keeps a process waiting.
SILENCE_S = 30.0
HEAD_S = 20  # in which the head of a request has to be there
SENDING_S = 20  # in which a client has to read some of its answer
# That is read on of a request which is answered already, so that its client gets the answer.
LATE_S = 10
LOST_S = 60  # until the system gives up what a client does not take
IDLE_S = 75  # that a connection may stay without a request
MESSAGE_S = 30.0  # in which the message of a request over gRPC has to be there
METRICS_S = 10.0  # that a server may take to give its metrics
GRPC_DRAIN_S = 0.2  # that calls over gRPC get to leave before the port is closed
RECOMMENDER_END_S = 5.0  # that requests of a recommender which run get at the end
# Beyond the time of requests at the end, until the process ends whatever runs.
RECOMMENDER_CLOSE_S = 3.0
LAST_S = 5  # until the system ends a process in which no thread of Python runs
GRPC_END_S = 5.0  # beyond those that requests have at the end, until the port of gRPC is closed
CLOSE_S = 5.0  # beyond the time of requests at the end, until the process ends whatever runs
WORKER_END_S = 10.0  # more than the grace, until a serving worker is killed
REQUESTS_END_S = 30.0  # that requests which run get at the end

# -- ages of kept files ---------------------------------------------------------------------------

# From which an archive of an environment that has changed since is removed.
OLD_ARCHIVE_S = 24 * 3600.0
UNUSED_CLASSES_S = 30 * 24 * 3600.0  # from which an archive of classes that nobody used is removed
OLD_CHOICE_S = 90 * 24 * 3600.0  # from which what was measured on a machine is removed

ORDERS: tuple[tuple[float, ...], ...] = (
    # The driver looks several times between two heartbeats.
    (DRIVER_LOOK_S, HEARTBEAT_S),
    # A worker waits for the cause of a loss, its peers notice the loss, leave, and are ended.
    (HEARTBEAT_S, CAUSE_S, LOSS_NOTICE_S, STAGE_LEAVE_S, WORKERS_END_S),
    # What holds up an error ends before the workers are ended.
    (CLEAN_UP_S, WORKERS_END_S),
    # A connection opens, proves itself, is answered and greeted, before a collective gives up.
    (WORKER_CONNECT_S, HANDSHAKE_S, STORE_REQUEST_S, GREETING_S, COLLECTIVE_S),
    # All workers have joined before one that waits for them gives up.
    (WORKERS_JOIN_S, COLLECTIVE_S),
    # A process sees that its parent is gone before it is killed.
    (PARENT_LOOK_S, LOCAL_EXIT_S),
    # A process has hung up, or been asked, before it is killed.
    (LAUNCH_LOOK_S, LAUNCH_GRACE_S),
    # Ray notices a lost node before workers that come for others are given up.
    (INTERRUPT_LOOK_S, NODE_LOSS_S, WORKERS_JOIN_S),
    # An actor has its place before its process must be up.
    (ACTOR_PLACE_S, ACTOR_START_S),
    # A server of Spark Connect is looked for several times.
    (CONNECT_SERVER_LOOK_S, CONNECT_SERVER_S),
    # A JVM that breaks is seen, may end by itself, and is killed at last.
    (JVM_LOOK_S, JVM_BROKEN_S, JVM_EXIT_S, JVM_STOPPED_S, JVM_STOP_S),
    # Executors are looked at several times; pods may take longest.
    (EXECUTORS_LOOK_S, POD_LOST_S, POD_PLACE_S, EXECUTORS_S, PODS_START_S),
    # A job of Spark is asked before it is given up.
    (FAILED_TASKS_S, TASKS_LOOK_S, SPARK_ANSWER_S, SPARK_CANCEL_S),
    # Ray's head answers before Ray is given up.
    (RAY_LOOK_S, RAY_ANSWER_S, RAY_SHUTDOWN_S, RAY_START_S),
    # A broker is called several times before it is given up.
    (BROKER_PAUSE_S, BROKER_CALL_S, SINK_CALL_S, BROKER_S),
    # Several signs of life are missed before a worker is replaced.
    (SERVING_HEARTBEAT_S, SILENCE_S),
    # A connection outlives its slowest request.
    (LATE_S, HEAD_S, LOST_S, IDLE_S),
    # Ports are closed before the process ends, and the process before it is killed.
    (GRPC_DRAIN_S, CLOSE_S, WORKER_END_S, REQUESTS_END_S),
)
"""Limits that must grow in this order."""
