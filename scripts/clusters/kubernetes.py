#!/usr/bin/env python3
"""Local Kubernetes: a control plane and nodes in separate namespaces.

python scripts/clusters/kubernetes.py start DIR [N]        # N nodes (2): node1, node2 ...
python scripts/clusters/kubernetes.py status DIR
python scripts/clusters/kubernetes.py stop DIR             # all of it, its networks and cgroups
python scripts/clusters/kubernetes.py node-stop DIR NODE   # kill all that runs on a node, at once
python scripts/clusters/kubernetes.py node-start DIR NODE
python scripts/clusters/kubernetes.py node-cut DIR NODE    # its network is down; its processes live
python scripts/clusters/kubernetes.py node-mend DIR NODE
python scripts/clusters/kubernetes.py load DIR FILE ...    # archives of images, to every node
python scripts/clusters/kubernetes.py machine DIR          # the image localhost/machine:1
python scripts/clusters/kubernetes.py kubectl DIR ARG ...

The image localhost/machine:1 is nothing but links: pods that are made by the template DIR/pod.json
have this machine's /usr, Python and BigDL, so that nothing is built and little is loaded.

DIR/admin.conf is the KUBECONFIG of an administrator. The API server is https://10.77.0.1:6443, the
nodes are 10.77.0.11 and on, pods 10.79.N.0/24, services 10.78.0.0/24; all of this stays on this
machine, and there is one such cluster at a time.

Needs root and, of Debian, containerd, runc, containernetworking-plugins, iptables, conntrack and
iproute2. All parts of Kubernetes are one program, kubelab, which BIGDL_CLUSTERS has or Go builds.
"""

import contextlib
import hashlib
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil
from binaries import HERE, find, missing
from daemons import Daemons, java_home, run_command, spark_home

ADDRESS, API = "10.77.0.1", "https://10.77.0.1:6443"
SERVICES, PODS = "10.78.0.0/24", "10.79.0.0/16"
BRIDGE, PAUSE, MACHINE = "kubelab0", "localhost/pause:1", "localhost/machine:1"
CGROUPS = ("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids")
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "dns")
_PROGRAMS = ("containerd", "runc", "iptables", "conntrack", "ip", "openssl", "nsenter", "unshare")
_PLUGINS = Path("/usr/lib/cni")
_MOST_NODES = 9


def _build(folder: Path) -> None:
    subprocess.run([HERE / "kubelab" / "build.sh"], env={**os.environ, "OUT": folder}, check=True)


@cache
def binaries() -> Path:
    """Return the folder of the kubelab and pause binaries, unpacked to the user's cache."""
    folder = find("kubernetes/bin", _build)
    if (folder / "kubelab").exists():
        return folder
    size = (folder / "kubelab.xz").stat().st_size
    unpacked = Path.home() / ".cache" / "bigdl-clusters" / f"kubelab-{size}"
    unpacked.mkdir(parents=True, exist_ok=True)
    for name in ("kubelab", "pause"):
        if not (unpacked / name).exists():
            part = unpacked / f"{name}.{os.getpid()}"
            with lzma.open(folder / f"{name}.xz") as packed, open(part, "wb") as file:
                shutil.copyfileobj(packed, file)
            part.chmod(0o755)
            part.rename(unpacked / name)
    return unpacked


def kubelab() -> str:
    return str(binaries() / "kubelab")


def kubectl(folder: Path, *arguments: str) -> str:
    """Return the output of a kubectl command, or an empty string if it fails."""
    command = [kubelab(), "kubectl", "--kubeconfig", str(folder / "admin.conf"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _until(what: str, test: Callable[[], object], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            raise SystemExit(f"There was no {what} after {seconds:g} s; see the logs")
        time.sleep(0.2)


# -- certificates ------------------------------------------------------------------------------


def _certificate(folder: Path, name: str, common: str, group: str = "", names: str = "") -> None:
    path = folder / "pki" / name
    if path.with_suffix(".crt").exists():
        return
    subject = f"{f'/O={group}' if group else ''}/CN={common}"
    # Spark's client reads no PKCS#8 key of an elliptic curve: "Invalid DER: object is not integer"
    key = ["-newkey", "rsa:2048", "-nodes", "-keyout", f"{path}.key", "-subj", subject]

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, stderr=subprocess.DEVNULL)

    if name == "ca":
        openssl("req", "-x509", *key, "-out", f"{path}.crt", "-days", "3650")
        return
    extensions = "keyUsage=digitalSignature\nextendedKeyUsage=clientAuth,serverAuth\n"
    _write(Path(f"{path}.ext"), extensions + (f"subjectAltName={names}\n" if names else ""))
    openssl("req", "-new", *key, "-out", f"{path}.csr")
    authority = ["-CA", f"{folder}/pki/ca.crt", "-CAkey", f"{folder}/pki/ca.key"]
    options = ["-CAcreateserial", "-days", "3650", "-extfile", f"{path}.ext"]
    openssl("x509", "-req", "-in", f"{path}.csr", *authority, *options, "-out", f"{path}.crt")


def _kubeconfig(folder: Path, name: str, common: str, group: str = "") -> None:
    _certificate(folder, name, common, group)
    keys = f"{folder}/pki/{name}"
    cluster = {"server": API, "certificate-authority": f"{folder}/pki/ca.crt"}
    user = {"client-certificate": f"{keys}.crt", "client-key": f"{keys}.key"}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
    }
    _write(folder / f"{name}.conf", json.dumps(content, indent=1))


# -- control plane -----------------------------------------------------------------------------


def _control_plane(folder: Path) -> None:
    pki = folder / "pki"
    pki.mkdir(mode=0o700, parents=True, exist_ok=True)
    _certificate(folder, "ca", "kubelab")
    own = "kubernetes", "kubernetes.default", "kubernetes.default.svc"
    dns = ("localhost", *own, "kubernetes.default.svc.cluster.local")
    names = [f"IP:{ip}" for ip in ("127.0.0.1", ADDRESS, "10.78.0.1")] + [f"DNS:{n}" for n in dns]
    _certificate(folder, "apiserver", "kube-apiserver", names=",".join(names))
    if not (pki / "sa.key").exists():
        _run("openssl", "genrsa", "-out", f"{pki}/sa.key", "2048")
    _kubeconfig(folder, "admin", "admin", "system:masters")
    for part in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
        _kubeconfig(folder, part, f"system:{part}")
    # Addresses that are not, or no longer, the cluster's never leave this machine; stays for good.
    _run("ip", "route", "replace", "unreachable", "10.76.0.0/14", "metric", "4000000000")
    if not Path("/sys/class/net", BRIDGE).exists():
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "addr", "add", f"{ADDRESS}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
    start = _starter(folder)
    start(
        "etcd",
        f"--data-dir={folder}/etcd",
        "--unsafe-no-fsync",
        "--log-level=warn",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
    )
    start(
        "kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--bind-address={ADDRESS}",
        f"--advertise-address={ADDRESS}",
        "--secure-port=6443",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.key",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-cluster-ip-range={SERVICES}",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
        "--default-not-ready-toleration-seconds=10",
        "--default-unreachable-toleration-seconds=10",
    )
    _until("API server", lambda: kubectl(folder, "get", "--raw", "/readyz") == "ok")
    start(
        "kube-controller-manager",
        f"--kubeconfig={folder}/kube-controller-manager.conf",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        "--node-monitor-period=2s",
        "--node-monitor-grace-period=16s",
    )
    start(
        "kube-scheduler",
        f"--kubeconfig={folder}/kube-scheduler.conf",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    )
    start("dns", f"{folder}/admin.conf", f"{ADDRESS}:53")
    account = ("get", "serviceaccount", "default", "-o", "name")
    _until("default service account", lambda: kubectl(folder, *account))


def _starter(folder: Path) -> Callable[..., None]:
    daemons = Daemons(folder)
    return lambda part, *arguments: daemons.start(part, [kubelab(), part, *arguments])


# -- nodes -------------------------------------------------------------------------------------

# Network, mounts, processes and separate cgroups: to kill its first process is to lose the node.
# The sysctls that the kubelet wants are files of the node, bound over those of this machine.
_NODE = r"""
set -eu
for c in $CGROUPS systemd unified; do
  g=/sys/fs/cgroup/$c/$NAME; mkdir -p $g
  if [ $c = cpuset ]; then
    cat $g/../cpuset.cpus > $g/cpuset.cpus; cat $g/../cpuset.mems > $g/cpuset.mems
  fi
  echo $$ > $g/cgroup.procs
  [ $c != cpu ] || echo 16384 > $g/cpu.shares  # else the node weighs as much as one process
done
exec nsenter --net=/run/netns/$NAME unshare -m -p -f -C --kill-child sh -euc '
  mount --make-rprivate /
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys
  mount -t tmpfs tmpfs /sys/fs/cgroup
  for c in $CGROUPS; do
    mkdir /sys/fs/cgroup/$c; mount -t cgroup -o $c cgroup /sys/fs/cgroup/$c
  done
  mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
  mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
  for k in vm/overcommit_memory:1 vm/panic_on_oom:0 kernel/panic:10 kernel/panic_on_oops:1 \
           kernel/keys/root_maxkeys:1000000 kernel/keys/root_maxbytes:25000000; do
    f=$NODE/sysctl/${k%:*}; mkdir -p ${f%/*}; echo ${k#*:} > $f
    mount --bind $f /proc/sys/${k%:*}
  done
  for m in run var/log/pods var/log/containers var/lib/cni; do
    mkdir -p $NODE/$m /$m; mount --bind $NODE/$m /$m
  done
  mkdir -p /run/netns
  mount --make-rshared /
  containerd --config $NODE/containerd.toml >>$NODE/containerd.log 2>&1 &
  until ctr -a $NODE/containerd.sock version >/dev/null 2>&1; do sleep 0.1; done
  ctr -a $NODE/containerd.sock -n k8s.io images import $NODE/../pause.tar >/dev/null
  $KUBELAB kube-proxy --kubeconfig=$NODE/../kube-proxy.conf --hostname-override=$NAME \
    --cluster-cidr=$PODS --proxy-mode=iptables --conntrack-max-per-core=0 \
    --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 \
    --healthz-bind-address=127.0.0.1:10256 >>$NODE/kube-proxy.log 2>&1 &
  $KUBELAB kubelet --config=$NODE/kubelet.json --kubeconfig=$NODE/../$NAME.conf \
    --root-dir=$NODE/kubelet --cert-dir=$NODE/kubelet/pki --hostname-override=$NAME \
    --node-ip=$IP >>$NODE/kubelet.log 2>&1 &
  wait'
"""
_CONTAINERD = """version = 2
root = "{node}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{node}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{node}/cni"
"""


def _number(name: str) -> int:
    return int(name.removeprefix("node"))


def _link(name: str) -> str:
    return f"kubelab{_number(name)}"


def node_address(name: str) -> str:
    return f"10.77.0.{10 + _number(name)}"


def node_start(folder: Path, name: str) -> None:
    node = folder / name
    _kubeconfig(folder, name, f"system:node:{name}", "system:nodes")
    if not Path("/run/netns", name).exists():
        _add_network(name)
    _write(node / "cni" / "10-ptp.conflist", json.dumps(_pod_network(name)))
    text = _CONTAINERD.format(node=node, pause=PAUSE, plugins=_PLUGINS)
    _write(node / "containerd.toml", text)
    _write(node / "resolv.conf", "")
    image(folder / "pause.tar", PAUSE, {"pause": binaries() / "pause"}, ["/pause"])
    _write(node / "kubelet.json", json.dumps(_kubelet(folder, node), indent=1))
    variables = {
        "CGROUPS": " ".join(CGROUPS),
        "KUBELAB": kubelab(),
        "PODS": PODS,
        "IP": node_address(name),
        "NODE": str(node),
        "NAME": name,
    }
    Daemons(folder).start(name, ["sh", "-c", _NODE], **variables)


def _add_network(name: str) -> None:
    number, link = _number(name), _link(name)
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", link, "master", BRIDGE, "up")
    inside = ["ip", "-n", name]
    _run(*inside, "addr", "add", f"{node_address(name)}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "route", "add", "default", "via", ADDRESS)
    _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    _run("ip", "route", "replace", f"10.79.{number}.0/24", "via", node_address(name))
    for other in range(1, _MOST_NODES + 1):
        if other != number:
            gateway = node_address(f"node{other}")
            _run(*inside, "route", "add", f"10.79.{other}.0/24", "via", gateway)


def _pod_network(name: str) -> dict:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": f"10.79.{_number(name)}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    plugins = [{"type": "ptp", "ipMasq": False, "ipam": addresses}, ports]
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": plugins}


def _kubelet(folder: Path, node: Path) -> dict:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": f"{folder}/pki/ca.crt"},
        },
        "containerRuntimeEndpoint": f"unix://{node}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "featureGates": {"KubeletInUserNamespace": True},
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "clusterDNS": [ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{node}/resolv.conf",
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 12,
        "volumePluginDir": f"{node}/volume-plugins",
    }


def node_stop(folder: Path, name: str) -> None:
    process = Daemons(folder).process(name)
    if process is None:
        return
    family = [*process.children(), process]  # the child is the node's first process
    for each in family:
        each.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, 20)
    Daemons(folder).stop([name])


def _node_remove(folder: Path, name: str) -> None:
    node_stop(folder, name)
    for kind in (*CGROUPS, "systemd", "unified"):
        for path, _, _ in os.walk(f"/sys/fs/cgroup/{kind}/{name}", topdown=False):
            _until(f"empty cgroup {path}", lambda path=path: _removed(path), 10)
    # a link would go with the namespace, but some time later
    for what in (["link", "del", _link(name)], ["netns", "del", name]):
        subprocess.run(["ip", *what], capture_output=True, check=False)


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def node_cut(folder: Path, name: str) -> None:
    _run("ip", "link", "set", _link(name), "down")


def node_mend(folder: Path, name: str) -> None:
    _run("ip", "link", "set", _link(name), "up")


# -- images ------------------------------------------------------------------------------------


def load(folder: Path, *files: str) -> None:
    for name in _nodes(folder):
        for file in files:
            socket = f"{folder}/{name}/containerd.sock"
            command = ["ctr", "-a", socket, "-n", "k8s.io", "images", "import", file]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def machine(folder: Path) -> None:
    """Load an image with the programs of this machine, and write its pod template."""
    files = {
        **{name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")},
        "etc": None,
        "etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nspark:x:185:0::/tmp:/bin/sh\n",
        "etc/group": b"root:x:0:\n",
        "opt": None,
        "opt/entrypoint.sh": HERE.parents[1] / "docker" / "entrypoint.sh",
        "tmp": None,
    }
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/usr/sbin",
        "SPARK_HOME": str(spark_home()),
        "PYSPARK_PYTHON": sys.executable,
        "JAVA_HOME": str(java_home()),
        "PYTHONPATH": str(HERE.parents[1] / "src"),
    }
    pairs = [f"{name}={value}" for name, value in environment.items()]
    load(folder, str(image(folder / "machine.tar", MACHINE, files, ["/opt/entrypoint.sh"], pairs)))
    java = Path("/etc") / java_home().name.replace("-amd64", "")
    shown = [Path("/usr"), java, Path(sys.base_prefix), Path(sys.prefix), HERE.parents[1] / "src"]
    volumes = {f"v{index}": str(path) for index, path in enumerate(shown) if path.exists()}
    mounts = [{"name": n, "mountPath": path, "readOnly": True} for n, path in volumes.items()]
    template = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "containers": [{"name": "main", "volumeMounts": mounts}],
            "volumes": [{"name": n, "hostPath": {"path": path}} for n, path in volumes.items()],
        },
    }
    _write(folder / "pod.json", json.dumps(template, indent=1))


def image(
    path: Path,
    reference: str,
    files: Mapping[str, Path | bytes | str | None],
    entrypoint: Sequence[str],
    environment: Sequence[str] = (),
) -> Path:
    """Write the archive of a single-layer image.

    Parameters
    ----------
    files : mapping
        Names in the image to files of this machine, bytes, None for a folder, or the text that a
        symbolic link holds.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as layer:
        for name, what in files.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o1777 if name == "tmp" else 0o755
            data = what.read_bytes() if isinstance(what, Path) else what
            if isinstance(data, bytes):
                info.size = len(data)
                layer.addfile(info, io.BytesIO(data))
            else:
                info.type = tarfile.SYMTYPE if data else tarfile.DIRTYPE
                info.linkname = data or ""
                layer.addfile(info)
    layer_bytes = content.getvalue()
    digest = f"sha256:{hashlib.sha256(layer_bytes).hexdigest()}"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint), "Env": list(environment), "WorkingDir": "/tmp"},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [reference], "Layers": ["layer.tar"]}]
    members = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer_bytes,
        "manifest.json": json.dumps(manifest).encode(),
    }
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


# -- commands ----------------------------------------------------------------------------------


def _nodes(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("node*/kubelet.json"))


def check() -> None:
    """Exit if the cluster cannot run here."""
    if os.geteuid():
        missing("Kubernetes needs root here")
    absent = [name for name in _PROGRAMS if not shutil.which(name)]
    if not (_PLUGINS / "ptp").exists():
        absent.append("containernetworking-plugins")
    if absent:
        missing(f"Kubernetes needs {', '.join(absent)}, which apt-get installs")
    absent = [kind for kind in CGROUPS if not Path("/sys/fs/cgroup", kind).is_dir()]
    if absent:
        missing(f"Kubernetes needs cgroups of version 1 here; {', '.join(absent)} are not there")


def start(folder: Path, count: str = "2") -> None:
    check()
    if other := _running_cluster():
        missing(f"One Kubernetes can run here at a time, and one runs in {other}; stop that first")
    binaries()  # or there is nothing to start
    stop(folder)  # networks that a killed cluster has left
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"node{number}" for number in range(1, int(count) + 1)]
    try:
        _control_plane(folder)
        kubectl(folder, "delete", "nodes", "--all")  # which an earlier start has left in etcd
        for name in names:
            node_start(folder, name)
        try:
            _until("ready nodes", lambda: not _unready(folder, names), 60)
        except SystemExit:  # a node that came up wrong stays so: it is started once more
            for name in _unready(folder, names):
                node_stop(folder, name)
                node_start(folder, name)
            _until("ready nodes", lambda: not _unready(folder, names))
    except SystemExit as error:
        logs = Daemons(folder).tails(names)
        stop(folder)
        raise SystemExit(f"{error}{logs}") from None
    except BaseException:
        stop(folder)
        raise
    print(f"KUBECONFIG={folder / 'admin.conf'}")


def _unready(folder: Path, names: list[str]) -> list[str]:
    rows = kubectl(folder, "get", "nodes", "--no-headers").splitlines()
    ready = {row.split()[0] for row in rows if row.split()[1] == "Ready"}
    return [name for name in names if name not in ready]


def _running_cluster() -> str | None:
    """Return the folder of the running cluster."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() == "kubelab":
                return process.cwd()
    return None


def stop(folder: Path) -> None:
    networks = [path.name for path in Path("/run/netns").glob("node[1-9]")]  # of any start
    for name in dict.fromkeys([*_nodes(folder), *networks]):
        _node_remove(folder, name)
    Daemons(folder).stop(patience=3)  # an API server waits for those who watch
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def status(folder: Path) -> None:
    daemons = Daemons(folder)
    for name in (*CONTROL_PLANE, *_nodes(folder)):
        print(f"{name}: {'runs' if daemons.process(name) else 'stopped'}")
    print(kubectl(folder, "get", "nodes", "-o", "wide"))


def run_kubectl(folder: Path, *arguments: str) -> None:
    """Replace this process by kubectl."""
    config = str(folder / "admin.conf")
    os.execv(kubelab(), [kubelab(), "kubectl", "--kubeconfig", config, *arguments])


def main() -> None:
    commands = {
        "start": start,
        "stop": stop,
        "status": status,
        "node-start": node_start,
        "node-stop": node_stop,
        "node-cut": node_cut,
        "node-mend": node_mend,
        "load": load,
        "machine": machine,
        "kubectl": run_kubectl,
    }
    run_command(__doc__ or "", commands)


if __name__ == "__main__":
    main()
