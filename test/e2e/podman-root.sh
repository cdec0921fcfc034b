#!/bin/sh
# Unpacks Debian's podman and buildah, with all that they need, into a folder
# that can be a root file system: podman-root.sh CACHE ROOT. Nothing is installed
# on this machine; apt gets lists and cache of its own, which test/vm has made.
set -eu
cache=$1 root=$2
packages="podman buildah crun busybox-static"
apt="apt-get -q -y --no-install-recommends -o Dir::Etc::SourceList=$cache/vm/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists=$cache/vm/apt/lists -o Dir::State::status=/dev/null -o Dir::Cache=$cache/podman -o APT::Sandbox::User=root"
[ -e "$root.tar" ] && [ "$root.tar" -nt "$0" ] && exit
mkdir -p "$cache/podman/archives/partial"
rm -rf "$root"
mkdir -p "$root"
# shellcheck disable=SC2086
$apt install --download-only $packages
for deb in "$cache"/podman/archives/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --no-same-owner \
		--exclude='./usr/share/*' --exclude=./usr/lib/cni --exclude='*perl*' --exclude=./var/lib/dpkg
done
tar -c -C "$root" -f "$root.tar" .
