#!/bin/sh
# Puts containerd into the guest and runs the test binary: Debian's, or version
# 2 with Debian's runc.
set -e
tar -x -C / -f /bed/root.tar
CONTAINERD=/usr/bin
if [ "$CONTAINERD_VERSION" = 2 ]; then
	CONTAINERD=/tmp/containerd2
	cp -r /bed/containerd2 $CONTAINERD
fi
export CONTAINERD
exec /bed/guest.sh "$@"
