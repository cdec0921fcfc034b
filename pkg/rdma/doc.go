// Package rdma speaks RDMA netlink: the kernel's namespace mode, its RDMA
// devices, their ports and their character devices.
//
// RDMA netlink answers from the network namespace of the socket, and moves a
// device only for a thread that is itself in the device's namespace
// (drivers/infiniband/core/device.c, rdma_dev_change_netns). Therefore every
// request goes through a Conn, a Conn belongs to one namespace, and the only
// way into another namespace is Namespace.Do.
//
// Devices are identified by their index. A name is for people: udev, the
// kernel and privileged pods change it.
package rdma
