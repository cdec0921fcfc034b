#!/bin/sh
# Lays out the root file system of the image for one architecture:
# image-root.sh DIR EPOCH, where DIR/usr/bin has the programs. Modes and times
# are set, so that neither umask nor clock shows in the image.
set -eu
dir=$1 epoch=$2
cd "$(dirname "$0")/../.."
mkdir -p "$dir/licenses"
cp LICENSE "$dir/licenses/LICENSE"
for name in entrypoint.sh entrypoint; do
	ln -sfn /usr/bin/rdma-cni "$dir/$name"
done
find "$dir" -type d -exec chmod 0755 {} +
find "$dir" -type f -exec chmod 0644 {} +
chmod 0755 "$dir"/usr/bin/*
find "$dir" -depth -exec touch -h -d "@$epoch" {} +
