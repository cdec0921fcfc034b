#!/bin/sh
# Builds the image from CONTEXT (made by `make image`) with whichever of
# buildah, podman and docker is there and works, and prints the digests. The same
# context, version and date give the same digest with the same tool.
#
#	image.sh CONTEXT IMAGE ARCH...
#
# Environment: VERSION, REVISION, SOURCE_DATE_EPOCH; ENGINE chooses the tool.
# Several architectures become one manifest list with buildah and podman, and
# one image each, IMAGE-ARCH, with docker.
set -eu
context=$1 image=$2
shift 2
created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)

works() {
	case $1 in
	docker) docker info >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 ;;
	*) command -v "$1" >/dev/null ;;
	esac
}
if [ -z "${ENGINE:-}" ]; then
	for ENGINE in buildah podman docker none; do
		[ "$ENGINE" = none ] || ! works "$ENGINE" || break
	done
elif ! works "$ENGINE"; then
	echo "image.sh: ENGINE=$ENGINE: it is not installed or does not work here (docker needs its daemon and buildx)" >&2
	exit 1
fi
if [ "$ENGINE" = none ]; then
	echo "image.sh: building the image needs buildah, podman, or docker with buildx and a running daemon; none of them is here. On Debian: apt-get install buildah" >&2
	exit 1
fi

case $ENGINE in
buildah | podman)
	# A list of this name from an earlier build would only be added to.
	"$ENGINE" manifest rm "$image" >/dev/null 2>&1 || "$ENGINE" rmi "$image" >/dev/null 2>&1 || true
	for arch; do
		build="podman build"
		[ "$ENGINE" = podman ] || build="buildah bud"
		# Nothing is run in it, so nothing has to be isolated. Layers are not
		# cached: the cache would keep the times of an earlier build.
		$build --isolation chroot --layers=false --format oci --platform "linux/$arch" --timestamp "$SOURCE_DATE_EPOCH" \
			--build-arg VERSION="$VERSION" --build-arg REVISION="$REVISION" --build-arg CREATED="$created" \
			--manifest "$image" -f "$context/Dockerfile" "$context"
	done
	"$ENGINE" manifest inspect "$image" | grep -o 'sha256:[0-9a-f]*'
	;;
docker)
	for arch; do
		docker buildx build --platform "linux/$arch" --provenance=false \
			--build-arg SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" \
			--build-arg VERSION="$VERSION" --build-arg REVISION="$REVISION" --build-arg CREATED="$created" \
			--output "type=docker,name=$image-$arch,rewrite-timestamp=true" -f "$context/Dockerfile" "$context"
		docker image inspect --format '{{.Id}}' "$image-$arch"
	done
	;;
esac
