#!/bin/bash
# Entry point for Spark on Kubernetes: "driver ..." and "executor" start these processes; other
# arguments are a command. Spark sets the variables in its pods.
set -e

classpath="$SPARK_CONF_DIR:$SPARK_HOME/jars/*"
[ -n "$SPARK_EXTRA_CLASSPATH" ] && classpath="$classpath:$SPARK_EXTRA_CLASSPATH"
[ -n "$HADOOP_CONF_DIR" ] && classpath="$HADOOP_CONF_DIR:$classpath"

# A cluster may run the image as a user that is not in /etc/passwd, but Hadoop needs a user name.
if ! getent passwd "$(id -u)" >/dev/null; then
    names=$(mktemp)
    printf 'spark:x:%s:%s::%s:/bin/false\n' "$(id -u)" "$(id -g)" "$HOME" | cat - /etc/passwd >"$names"
    export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD=$names NSS_WRAPPER_GROUP=/etc/group
fi

init=()
command -v tini >/dev/null && init=(tini -s --)

case "$1" in
driver)
    shift
    exec "${init[@]}" "$SPARK_HOME/bin/spark-submit" \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" \
        --deploy-mode client "$@"
    ;;
executor)
    options=()
    while IFS= read -r line; do
        options+=("${line#*=}")
    done < <(env | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n)
    exec "${init[@]}" "$JAVA_HOME/bin/java" "${options[@]}" \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" -cp "$classpath:$PWD" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" \
        --executor-id "$SPARK_EXECUTOR_ID" \
        --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" \
        --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
        --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*)
    exec "${init[@]}" "$@"
    ;;
esac
