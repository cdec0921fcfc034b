# The image is two static programs and nothing else: no shell, no package
# manager, no base to update. `make image` compiles them for each architecture
# into build/image, which is the build's context, and builds this.
FROM scratch
ARG TARGETARCH
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="rdma-cni" \
      org.opencontainers.image.description="CNI plugin that moves the RDMA device of a VF into a pod, its companion rdma-cni, and their installer" \
      org.opencontainers.image.source="https://github.com/rdma-cni/rdma-cni" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
COPY linux/${TARGETARCH}/ /
# Root, because the node's CNI directory is root's.
USER 0:0
# A link to rdma-cni, which called so is its command install. The name is that
# of the image which this one replaces: manifests may call it.
ENTRYPOINT ["/entrypoint.sh"]
