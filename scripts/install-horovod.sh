#!/usr/bin/env bash
# Build Horovod for the installed torch, and install it.
#
#     scripts/install-horovod.sh [--python PYTHON] [--target DIRECTORY]
#
# PYTHON    interpreter with the torch to build for (default: python3)
# DIRECTORY target folder instead of PYTHON's packages; add it to PYTHONPATH
#
# Needs a C++ compiler, CMake 3.13 or newer, setuptools, cffi and pyyaml. Nothing else is installed
# or replaced. JOBS sets the number of compiler processes (default: one per core).
set -euo pipefail

version=0.28.1 # the last release; its CMake files set C++14, but torch's headers need C++17
python=python3
target=()

while (($#)); do
    case "$1" in
        --python) python="$2"; shift 2 ;;
        --target) target=(--target "$(mkdir -p "$2" && cd "$2" && pwd)"); shift 2 ;;
        *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
    esac
done

fail() {
    echo "install-horovod.sh: $*" >&2
    exit 1
}

python="$(command -v "$python")" || fail "there is no such Python; pass --python"
for tool in cmake "${CXX:-c++}" make; do
    command -v "$tool" >/dev/null || fail "$tool is not installed; install a C++ compiler, make and CMake"
done
for module in torch setuptools cffi yaml; do
    "$python" -c "import $module" 2>/dev/null \
        || fail "$module is not installed; run: $python -m pip install ${module/yaml/pyyaml}"
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
pip=("$python" -m pip --disable-pip-version-check)
"${pip[@]}" download --quiet --no-deps --no-binary :all: --no-build-isolation "horovod==$version"
tar -xf "horovod-$version.tar.gz"
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
    "horovod-$version/CMakeLists.txt" "horovod-$version/horovod/torch/CMakeLists.txt"

# gloo and torch only: TensorFlow's part no longer builds, and MPI is not needed
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1
export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export MAKEFLAGS="-j${JOBS:-$(nproc)}"
export CMAKE_POLICY_VERSION_MINIMUM=3.5 # for CMake 4, which rejects the versions in its third-party files
"${pip[@]}" wheel --no-deps --no-build-isolation -w dist "./horovod-$version"
"${pip[@]}" install --no-deps --force-reinstall "${target[@]}" dist/horovod-*.whl

cd /
PYTHONPATH="${target[1]:-}${PYTHONPATH:+:$PYTHONPATH}" "$python" - <<'END'
import horovod.torch as hvd

assert hvd.gloo_built(), "Horovod was built without gloo"
print(f"Horovod is ready: {hvd.__file__}")
END
