#!/bin/sh
# Makes the files of a release: release.sh OUT VERSION EPOCH ARCH...
# The programs are those of the image, in build/image. OUT gets one archive and
# one bill of materials for each architecture, and SHA256SUMS. Nothing in them
# depends on the clock, the user or the folder.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
out=$1 version=$2 epoch=$3
shift 3
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for arch; do
	name=rdma-cni-$version-linux-$arch
	mkdir "$work/$name"
	cp "build/image/linux/$arch/usr/bin/rdma" "build/image/linux/$arch/usr/bin/rdma-cni" LICENSE README.md CHANGELOG.md "$work/$name/"
	cp -R docs deployment "$work/$name/"
	go run ./deployment/build/sbom "rdma-cni" "$version" "$epoch" "$work/$name/rdma" "$work/$name/rdma-cni" >"$out/$name.cdx.json"
	tar -c -C "$work" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --format=gnu "$name" |
		gzip -n -9 >"$out/$name.tar.gz"
done
(cd "$out" && sha256sum -- * >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
