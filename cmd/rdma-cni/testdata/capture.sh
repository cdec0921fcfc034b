#!/bin/sh
# Prints, as a txtar archive, what rdma-cni reads of a node: a PF and three VFs
# with RDMA devices, one at home, one in a pod with its record, one whose VF has
# no driver; and a scalable function. It is for the guest of test/vm:
#
#	make bed && .cache/bin/vm run -share build/bed -- sh -c "$(cat cmd/rdma-cni/testdata/capture.sh)" >cmd/rdma-cni/testdata/node.txtar
set -e
exec 3>&1 >/dev/null
for vf in 0000:01:10.0 0000:01:10.2 0000:01:10.4; do rdmasim add name=sim%d parent=pci:$vf; done
rdmasim add name=sf%d parent=aux:rdmasim.sf.4
ip netns add blue
ip link set eth2 netns blue name net1
echo '{"cniVersion":"1.1.0","name":"rail","type":"rdma","deviceID":"0000:01:10.2","prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"net1","sandbox":"/run/netns/blue"}]}}' |
	CNI_COMMAND=ADD CNI_CONTAINERID=c1 CNI_NETNS=/run/netns/blue CNI_IFNAME=net1 CNI_PATH=/bed/bin \
		CNI_ARGS='K8S_POD_NAMESPACE=training;K8S_POD_NAME=worker-0;K8S_POD_UID=u' /bed/bin/rdma 2>/dev/null
echo 0000:01:10.6 >/sys/bus/pci/devices/0000:01:10.6/driver/unbind
exec >&3

cd /
links=
for start in sys/class/infiniband sys/class/infiniband_verbs sys/class/infiniband_mad sys/class/net sys/class/misc/rdma_cm \
	sys/bus/pci/devices sys/bus/auxiliary/devices sys/bus/pci/drivers/igb sys/bus/pci/drivers/igbvf; do
	for l in $(find $start -maxdepth 1 -type l); do links="$links $l"; done
done
devices=$(for l in $links; do readlink -f $l; done | grep -E 'infiniband|/net/|0000:01|rdmasim|rdma_cm' | sort -u)
for d in $devices; do
	for l in $(find "${d#/}" -type l); do links="$links $l"; done
done
echo '-- links --'
for l in $links; do echo "$l -> $(readlink $l)"; done | sort -u | grep -v 'subsystem ->\|firmware_node\|/power\|/msi_irqs\|iommu'
for l in proc/thread-self/ns/net proc/1/ns/net proc/1/ns/mnt; do echo "$l -> $(readlink $l)"; done
echo '-- directories --'
for d in $devices; do find "${d#/}" -type d; done | sort -u | grep -v '/power\|/msi_irqs\|/queues\|/statistics\|hw_counters\|/counters\|wakeup'
ls -d sys/module/* | grep -E '/(ib_|rdma_|iw_|igb|rdmasim)'
for f in $(for d in $devices; do find "${d#/}" -type f; done | sort -u) \
	proc/1/comm proc/1/cgroup proc/1/mountinfo proc/1/limits proc/version proc/cmdline proc/sys/kernel/osrelease run/cni/rdma/*.json; do
	case $f in
	sys/*/class | */vendor | */device | */numa_node | */sriov_numvfs | */sriov_totalvfs | */ibdev | */dev | */mtu | */operstate | */address | */node_guid | */state | */link_layer | */gids/[0-3] | */gid_attrs/*/[0-3] | proc/* | run/*)
		text=$(cat $f 2>/dev/null) || continue
		echo "-- $f --"
		echo "$text"
		;;
	esac
done
