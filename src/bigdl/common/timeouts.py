"""Every time limit of the library, in seconds, with its reason.

Limits that depend on each other are neighbours; :data:`ORDERS` lists the chains whose order must
stay.  A name with ``LOOK`` is a polling interval; one poll costs little.  Limits that a user may
set are defaults of arguments.

The supervisor of Spark's daemons and Ray's nodes runs as a script without this package, and has
separate limits (:mod:`bigdl.orca.cluster.supervisor`).
"""

# -- the driver and the workers of a job ----------------------------------------------------------

DRIVER_LOOK_S = 0.05  # interval at which the driver polls the calls of its workers
HEARTBEAT_S = 0.5  # interval of a worker's heartbeats, which carry its progress and its log lines
PARENT_LOOK_S = 0.2  # interval at which a worker checks that its parent process exists
REPORT_WRITE_S = 0.5  # a report is written this long after the first of several tasks has ended
CONNECTION_TURN_S = 1.0  # longest wait of one thread before other threads get the connection
CAUSE_S = 1.0  # a worker whose peer is lost waits this long for another worker to report the cause
# Longest delay of an error report by the clean-up, such as leaving a process group.
CLEAN_UP_S = 1.0
ERROR_GRACE_S = 1.0  # workers may end by themselves for this long after the first error
LOSS_NOTICE_S = 2.0  # survivors have this long to notice a lost peer and to report the cause
STAGE_LEAVE_S = 3.0  # survivors of a failed stage have this long to leave it
WORKERS_END_S = 5.0  # workers have this long to end after an order to stop
GO_LOOK_S = 0.5  # interval at which a worker that waits for a replacement looks for errors
# A worker that is silent for this long after a collective has timed out on the others is ended.
HANG_GRACE_S = 5.0
SPARE_START_S = 3.0  # a fit that runs for this long prepares a process for the next loss
LEAVE_GROUP_S = 10.0  # limit for leaving a group whose collectives have failed
PEER_LOOK_S = 0.5  # interval at which a worker that waits for another one looks for its failure
JOIN_LOOK_S = 0.1  # interval at which connecting workers look for a loss
REJOIN_S = 30.0  # limit for connecting to each other after a loss
VOTE_S = 1.0  # interval of a fit's votes on leaving a machine that is decommissioned

WORKER_CONNECT_S = 5.0  # limit for opening a connection from a worker to the driver
HANDSHAKE_S = 10.0  # limit for the handshake of a connection, which occupies a slot until then
STORE_REQUEST_S = 60.0  # longest wait of one request in the driver's key-value store
GREETING_S = 120.0  # a worker waits this long for the driver's greeting: a busy driver greets late
TUNNEL_OPEN_S = 60.0  # limit for opening an encrypted tunnel between two workers
COLLECTIVE_S = 1800.0  # a worker may compile, read or evaluate much longer than its peers
WORKERS_JOIN_S = 120.0  # all workers must join in this time, as must replacements of lost ones

# -- processes of this machine --------------------------------------------------------------------

LAUNCH_LOOK_S = 0.1  # interval at which silent processes are polled
LOCAL_EXIT_S = 2.0  # a process may take this long to end after its connection was closed
POOL_GRACE_S = 2.0  # a pool worker may take this long to end by itself
OUTPUT_DRAIN_S = 2.0  # limit for reading a process's last output: another process may hold the pipe
KERNEL_KILL_S = 2.0  # limit for the kernel to end a killed process
PYTHON_ANSWER_S = 20.0  # limit for the answer of another Python interpreter
LAUNCH_GRACE_S = 5.0  # time between SIGTERM and SIGKILL
SYSCTL_S = 5.0  # limit for macOS to report the processor's features
LOCK_LOOK_S = 0.05  # interval of attempts to lock a file where the system cannot wait for a lock
MEMORY_LOOK_S = 0.002  # interval at which the memory of a trial is sampled
CLOCK_STEP_S = 2.0  # tolerance for a process's start time after the system clock was set
SEARCH_END_S = 2.0  # workers may take this long to end after the last trial of a search
TRIAL_START_S = 0.5  # a trial that would start later before its time limit learns nothing
PULSE_S = 0.05  # interval at which a worker that chaos slows down is stopped and continued
CHAOS_LOOK_S = 0.1  # interval at which disturbed fits are polled
STUDY_HEARTBEAT_S = 1.0  # interval at which the heartbeats of running trials are due
STUDY_LOCK_S = 120.0  # longest wait for other processes that write to the SQLite file of a study

# -- engines --------------------------------------------------------------------------------------

RANK0_LEAVE_S = 1.0  # other workers may end by themselves for this long where rank 0 has the store
DYNAMIC_WORKERS_NOTICE_S = 1.0  # dynamic workers have this long to notice a lost peer themselves
DEPARTURES_LOOK_S = 1.0  # interval at which departing executors are polled
DYNAMIC_WORKERS_LOG_S = 10.0  # a log message says after this time that workers are still missing
INTERRUPT_LOOK_S = 0.1  # interval at which Ctrl-C is checked while Ray works
ACTOR_PLACE_S = 60.0  # limit for placing a new actor, also on a busy machine
ACTOR_START_S = 120.0  # limit for starting the process of an actor
NODE_LOSS_S = 30.0  # limit for Ray to notice a lost node
TRIAL_FAILURE_S = 30.0  # limit for a worker's failure to reach the other workers of its trial
CONNECT_SERVER_LOOK_S = 5.0  # interval at which an unresponsive Spark Connect server is polled
CONNECT_SERVER_S = 30.0  # a Spark Connect server that is unreachable this long is given up
STORE_LOOK_S = 0.1  # interval at which the key-value store of MXNet is polled
STORE_END_S = 30.0  # the store of MXNet may take this long to end after its workers

# -- clusters -------------------------------------------------------------------------------------

TASK_CONNECT_S = 2.0  # limit for a connection from a task of Spark Connect to this process
CLUSTER_PROBE_S = 3.0  # limit for a cluster to accept a connection
FAILED_TASKS_S = 0.2  # Spark logs the end of a failed stage's tasks within this time
TASKS_LOOK_S = 0.5  # interval at which failed tasks are polled
SPARK_ANSWER_S = 2.0  # limit for the answer of a remote Spark server
SPARK_CANCEL_S = 10.0  # a cancelled Spark job may take this long to end
JVM_LOOK_S = 1.0  # interval at which the JVM is polled
JVM_BROKEN_S = 3.0  # a JVM may take this long to end after its connections broke
JVM_EXIT_S = 10.0  # a JVM may take this long to end by itself before it is killed
JVM_STOPPED_S = 30.0  # the program is notified after this time that its JVM is stopped
JVM_STOP_S = 60.0  # a JVM may take this long to stop its context before it is killed
EXECUTORS_LOOK_S = 5.0  # interval at which pods of unregistered executors are polled
EXECUTORS_S = 120.0  # executors may take this long to register, or to register again
PODS_LOOK_S = 0.5  # interval at which pods are polled
POD_LOST_S = 10.0  # a node must report the end of its pod within this time
POD_PLACE_S = 60.0  # limit for scheduling a pod; a cluster that adds nodes needs longer
PODS_START_S = 600.0  # limit for the start of executors, which may have to pull an image
YARN_LOGS_S = 60.0  # limit for YARN to collect the logs of a finished program
RAY_LOOK_S = 0.5  # interval at which the processes of Ray are polled
RAY_ANSWER_S = 10.0  # limit for the answer of Ray's head
RAY_SHUTDOWN_S = 25.0  # limit for ray.shutdown: longer than a supervisor's stop limit
RAY_START_S = 120.0  # all nodes of Ray must join within this time

# -- storage and other services -------------------------------------------------------------------

BROKER_PAUSE_S = 0.5  # pause between two failed calls of a Kafka broker
BROKER_CALL_S = 10.0  # limit for one call of a Kafka broker
SINK_CALL_S = 30.0  # limit for a Kafka broker to confirm records
BROKER_S = 120.0  # a Kafka broker is retried this long: it may be restarting
SOURCE_POLL_S = 1.0  # longest wait of one poll for records
NAME_NODE_S = 120.0  # a call waits this long for an HDFS name node; a restart takes about 40 s

WRITER_LOCK_S = 3600.0  # the lock of a dead Redis writer expires after this time
ATTRIBUTES_LOOK_S = 2.0  # interval at which the attributes of items are read again from Redis
DELTA_LOOK_S = 0.25  # interval at which a server looks for new versions of a followed model
STREAM_LOOK_S = 0.5  # interval at which a training program looks whether its query has ended
EVENTS_WRITE_S = 30.0  # longest wait for other processes that append events to the same folder

# -- servers of models and recommenders -----------------------------------------------------------

SERVING_HEARTBEAT_S = 1.0  # interval of a serving worker's heartbeats and of their checks
WORKER_PAUSE_S = 1.0  # pause before a serving worker that died at once is restarted
SIBLING_ANSWER_S = 2.0  # limit for the answer of another serving worker
REPLICA_AWAY_S = 0.5  # a failed replica of a shard is tried last for this long
SILENCE_S = 30.0  # longer than any call holds the GIL or a busy machine delays a worker
HEAD_S = 20  # limit for receiving the head of a request
SENDING_S = 20  # a client must read a part of its response within this time
LATE_S = 10  # the rest of an answered request is read this long, so that its client gets the answer
LOST_S = 60  # the system gives up data that a client does not accept for this long
IDLE_S = 75  # a connection may stay idle this long
MESSAGE_S = 30.0  # limit for receiving the message of a gRPC request
METRICS_S = 10.0  # limit for a server to return its metrics
GRPC_DRAIN_S = 0.2  # gRPC calls may leave for this long before the port is closed
RECOMMENDER_END_S = 5.0  # running requests of a recommender may take this long at shutdown
RECOMMENDER_CLOSE_S = 3.0  # added to the time of running requests before the process is ended
LAST_S = 5  # the system ends a process without running Python threads after this time
GRPC_END_S = 5.0  # added to the time of running requests before the gRPC port is closed
CLOSE_S = 5.0  # added to the time of running requests before the process is ended
WORKER_END_S = 10.0  # added to the grace period before a serving worker is killed
REQUESTS_END_S = 30.0  # running requests may take this long at shutdown

# -- preloaded processes ---------------------------------------------------------------------------

PRELOADED_LOOK_S = 0.5  # interval at which a process that forks looks for ends of its forks
PRELOADED_EXIT_S = 5.0  # a process that forks is killed if it does not end within this time

# -- engines of language models -------------------------------------------------------------------

ENGINE_LOOK_S = 0.05  # interval at which an engine's clients, and its start, are polled
ENGINE_IDLE_S = 2.0  # an engine ends this long after its last client has disconnected
ENGINE_START_S = 300.0  # limit for an engine to load its model

# -- ages of kept files ---------------------------------------------------------------------------

OLD_ARCHIVE_S = 24 * 3600.0  # archives of changed environments are removed at this age
UNUSED_CLASSES_S = 30 * 24 * 3600.0  # unused archives of classes are removed at this age
UNFINISHED_ARCHIVE_S = 24 * 3600.0  # an archive that is not there by then is started again
OLD_CHOICE_S = 90 * 24 * 3600.0  # measurements of a machine are removed at this age
OLD_NETWORK_S = 90 * 24 * 3600.0  # cached networks that were not used for this time are removed
UNFINISHED_NETWORK_S = 24 * 3600.0  # a network that is not written by then was left by a crash

ORDERS: tuple[tuple[float, ...], ...] = (
    # The driver polls several times between two heartbeats.
    (DRIVER_LOOK_S, HEARTBEAT_S),
    # A worker waits for the cause of a loss, its peers notice the loss, leave, and are stopped.
    (HEARTBEAT_S, CAUSE_S, LOSS_NOTICE_S, STAGE_LEAVE_S, WORKERS_END_S),
    # The clean-up after an error ends before the workers are stopped.
    (CLEAN_UP_S, WORKERS_END_S),
    # A connection opens, authenticates, is answered and greeted, before a collective gives up.
    (WORKER_CONNECT_S, HANDSHAKE_S, STORE_REQUEST_S, GREETING_S, COLLECTIVE_S),
    # All workers have joined before a waiting collective gives up.
    (WORKERS_JOIN_S, COLLECTIVE_S),
    # A process notices the end of its parent before it is killed.
    (PARENT_LOOK_S, LOCAL_EXIT_S),
    # A process has disconnected, or received SIGTERM, before it is killed.
    (LAUNCH_LOOK_S, LAUNCH_GRACE_S),
    # Ray notices a lost node before replacement workers are given up.
    (INTERRUPT_LOOK_S, NODE_LOSS_S, WORKERS_JOIN_S),
    # An actor is placed before its process must be up.
    (ACTOR_PLACE_S, ACTOR_START_S),
    # A server of Spark Connect is polled several times.
    (CONNECT_SERVER_LOOK_S, CONNECT_SERVER_S),
    # A broken JVM is noticed, may end by itself, and is killed at last.
    (JVM_LOOK_S, JVM_BROKEN_S, JVM_EXIT_S, JVM_STOPPED_S, JVM_STOP_S),
    # Executors are polled several times; pods may take longest.
    (EXECUTORS_LOOK_S, POD_LOST_S, POD_PLACE_S, EXECUTORS_S, PODS_START_S),
    # The state of a Spark job is requested before the job is given up.
    (FAILED_TASKS_S, TASKS_LOOK_S, SPARK_ANSWER_S, SPARK_CANCEL_S),
    # Ray's head answers before Ray is given up.
    (RAY_LOOK_S, RAY_ANSWER_S, RAY_SHUTDOWN_S, RAY_START_S),
    # A broker is called several times before it is given up.
    (BROKER_PAUSE_S, BROKER_CALL_S, SINK_CALL_S, BROKER_S),
    # Several heartbeats are missed before a worker is replaced.
    (SERVING_HEARTBEAT_S, SILENCE_S),
    # A process that forks has looked several times before it is killed.
    (PRELOADED_LOOK_S, PRELOADED_EXIT_S),
    # An engine is polled several times before it ends or its start is given up.
    (ENGINE_LOOK_S, ENGINE_IDLE_S, ENGINE_START_S),
    # A connection outlives its slowest request.
    (LATE_S, HEAD_S, LOST_S, IDLE_S),
    # Ports are closed before the process ends, and the process before it is killed.
    (GRPC_DRAIN_S, CLOSE_S, WORKER_END_S, REQUESTS_END_S),
)
"""Limits that must grow in this order."""
