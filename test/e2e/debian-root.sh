#!/bin/sh
# Unpacks Debian packages, with all that they need, into a tar that can be laid
# over the guest's root file system: debian-root.sh CACHE NAME PACKAGE... makes
# CACHE/NAME/root.tar. Nothing is installed on this machine; apt gets lists and
# a cache of its own, of which test/vm has made the lists.
set -eu
cache=$1 dir=$1/$2
shift 2
apt="apt-get -q -y --no-install-recommends -o Dir::Etc::SourceList=$cache/vm/apt/sources.list -o Dir::Etc::SourceParts=/dev/null
	-o Dir::State::Lists=$cache/vm/apt/lists -o Dir::State::status=/dev/null -o Dir::Cache=$dir -o APT::Sandbox::User=root"
[ "$(cat "$dir/packages" 2>/dev/null)" = "$*" ] && [ "$dir/root.tar" -nt "$0" ] && exit
rm -rf "$dir"
mkdir -p "$dir/archives/partial" "$dir/root"
# shellcheck disable=SC2086
$apt install --download-only "$@"
# In the guest bin and sbin are one folder, where the link usr/bin/runc would
# point to itself.
for deb in "$dir"/archives/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$dir/root" --no-same-owner \
		--exclude='./usr/share/*' --exclude=./usr/lib/cni --exclude='*perl*' --exclude=./var/lib/dpkg \
		--exclude=./usr/bin/containerd-shim --exclude=./usr/bin/containerd-shim-runc-v1 --exclude=./usr/bin/runc
done
tar -c -C "$dir/root" -f "$dir/root.tar.new" .
mv "$dir/root.tar.new" "$dir/root.tar"
echo "$*" >"$dir/packages"
