module github.com/rdma-cni/rdma-cni

go 1.26.8

require (
	github.com/Mellanox/rdmamap v1.2.0
	github.com/containernetworking/cni v1.3.1
	github.com/vishvananda/netlink v1.3.1
	golang.org/x/sys v0.50.0
)

require (
	github.com/go-logr/logr v1.4.4 // indirect
	github.com/onsi/ginkgo/v2 v2.34.0 // indirect
	github.com/onsi/gomega v1.44.0 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/net v0.59.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/tools v0.50.0 // indirect
)
