#!/bin/sh
# Builds kubelab (all parts of Kubernetes) and pause (static) into the folder OUT.
set -eu
cd "$(dirname "$0")"
v=$(sed -n 's/^\tk8s.io\/kubernetes v\([0-9.]*\).*/\1/p; s/^require k8s.io\/kubernetes v\([0-9.]*\).*/\1/p' go.mod | head -1)
p=k8s.io/component-base/version
export GOFLAGS=-p=2 CGO_ENABLED=0
go build -trimpath -ldflags "-s -w -X $p.gitVersion=v$v -X $p.gitMajor=1 -X $p.gitMinor=$(echo $v | cut -d. -f2)" -o "${OUT:?}/kubelab" .
go build -trimpath -ldflags "-s -w" -o "${OUT:?}/pause" ./pause
