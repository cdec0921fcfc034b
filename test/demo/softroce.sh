#!/bin/sh
# Shows two pods with soft-RoCE devices and RDMA traffic between them, for a
# person to read, in the guest of test/vm. What it shows it also asserts.
set -eu

CNI=/tmp/cni
export CNI_PATH=$CNI/bin NETCONFPATH=$CNI/net.d CNI_IFNAME=eth0
DEVICE=rxe_eth0 # the plugin's name for it

. /bed/show.sh

in_pod() { pod=$1; shift; ip netns exec "$pod" "$@"; }
address() { ip -n "$1" -4 -o addr show dev eth0 | awk '{ sub("/.*", "", $4); print $4 }'; }

# gid is the number of a pod's address in the GID table of its device.
gid() {
	want=$(address "$1" | awk -F. '{ printf "ffff:%02x%02x:%02x%02x", $1, $2, $3, $4 }')
	in_pod "$1" unshare -m sh -c "mount -t sysfs pod /mnt && cd /mnt/class/infiniband/$DEVICE/ports/1/gids && grep -l $want *"
}

# listens waits until a program accepts TCP connections, by which the two ends of
# a program for RDMA traffic find each other.
listens() {
	for _ in $(seq 200); do
		if cat /proc/"$1"/net/tcp /proc/"$1"/net/tcp6 2>/dev/null | grep -q ':0000 0A '; then return 0; fi
		usleep 50000
	done
	return 1
}

# between runs a program in pod1 as the server and in pod2 as the client, whose
# words are shown.
between() {
	option=$1; shift
	ip netns exec pod1 "$@" $option "$(gid pod1)" >/tmp/server 2>&1 &
	server=$!
	listens $server || fail "$1 does not listen in pod1: $(cat /tmp/server)"
	show ip netns exec pod2 "$@" $option "$(gid pod2)" "$(address pod1)"
	wait $server || fail "$1 in pod1: $(cat /tmp/server)"
}

tar -x -C / -f /bed/softroce.tar
mkdir -p $CNI/bin $CNI/net.d /var/log
for program in rdma ptp host-local cnitool; do
	cp /bed/bin/$program $CNI/bin/
done
cat >$CNI/net.d/lab.conflist <<NET
{
  "cniVersion": "1.1.0",
  "name": "lab",
  "plugins": [
    {
      "type": "ptp",
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "192.168.7.0/24"}]]
      }
    },
    {
      "type": "rdma",
      "softRoCE": true,
      "waitForGID": "10s",
      "logFile": "/var/log/rdma.log"
    }
  ]
}
NET

echo "Linux $(uname -r), Debian's kernel and its driver rdma_rxe. No RDMA adapter, real or"
echo "simulated. The pods are network namespaces; ptp joins them to the host by veth pairs."
modprobe rdma_rxe # elsewhere the kernel does so itself

title "the network"
sed 's/^/  /' $CNI/net.d/lab.conflist

title "two pods"
for pod in pod1 pod2; do
	ip netns add $pod
	ip -n $pod link set lo up
	printf '  $ cnitool add lab /run/netns/%s\n' $pod
	$CNI/bin/cnitool add lab /run/netns/$pod >/tmp/result 2>&1 || fail "ADD: $(cat /tmp/result)"
done
for pod in pod1 pod2; do
	show ip netns exec $pod rdma link
	[ "$(in_pod $pod rdma dev | wc -l)" = 1 ] || fail "$pod does not have one RDMA device"
	in_pod $pod rdma dev | grep -q ": $DEVICE: " || fail "$pod does not have $DEVICE"
done
note "each pod sees one device; both have the same name"
show rdma dev
[ -z "$(rdma dev)" ] || fail "the host has an RDMA device"
note "the host sees none"

title "isolation"
for pod in pod1 pod2; do
	nodes=
	for node in /dev/infiniband/uverbs*; do
		if in_pod $pod sh -c ": <$node" 2>/tmp/shown; then
			printf '  $ ip netns exec %s sh -c ": <%s"\n' $pod "$node"
			note "opened: it is the pod's own"
			nodes="$nodes$node "
		else
			printf '  $ ip netns exec %s sh -c ": <%s"\n' $pod "$node"
			sed 's/^.*cannot/      cannot/' /tmp/shown
			grep -q "not permitted" /tmp/shown || fail "$pod is refused $node for another reason than EPERM"
		fi
	done
	eval "${pod}_nodes=\$nodes"
done
# shellcheck disable=SC2154
[ "$(echo $pod1_nodes | wc -w) $(echo $pod2_nodes | wc -w)" = "1 1" ] || fail "pod1 can open '$pod1_nodes', pod2 '$pod2_nodes'"
[ "$pod1_nodes" != "$pod2_nodes" ] || fail "both pods can open $pod1_nodes"
note "each pod can open its own verbs node; the kernel refuses the other's"

title "RDMA traffic between the pods"
between -g ibv_rc_pingpong -e -n 200 -d $DEVICE
between -x ib_write_bw -F -s 65536 -n 100 -d $DEVICE
grep -q '^ *65536 ' /tmp/shown || fail "no bandwidth was measured"
bandwidth=$(awk '$1 == 65536 { print $4 }' /tmp/shown)
note "$bandwidth MB/s, on an emulated processor"

title "DEL"
for pod in pod1 pod2; do
	printf '  $ cnitool del lab /run/netns/%s\n' $pod
	$CNI/bin/cnitool del lab /run/netns/$pod >/tmp/result 2>&1 || fail "DEL: $(cat /tmp/result)"
	[ -z "$(in_pod $pod rdma dev)" ] || fail "$pod still has an RDMA device"
done
show rdma dev
[ -z "$(ls /sys/class/infiniband_verbs | grep uverbs || true)" ] || fail "an RDMA device is left"
left=$(ls /run/cni/rdma | grep -v '^lock$' || true)
[ -z "$left" ] || fail "a record is left: $left"

title "done: two isolated pods, RDMA traffic between them, nothing left"
