#!/bin/sh
# Shows one attachment from begin to end, for a person to read, in the guest of
# test/vm. What it shows it also asserts: it fails if the RDMA device did not
# move, or did not come home as it was.
set -eu

VF=0000:01:10.0
POD=pod1
CNI=/tmp/cni
export CNI_PATH=$CNI/bin NETCONFPATH=$CNI/net.d CNI_IFNAME=net1

. /bed/show.sh

# The interfaces of VFs without RDMA device are left out.
netdevs() { ip -br link | grep -v 'eth[3-9]'; }

show_host() {
	title "the host $*"
	show rdma dev
	show rdma link
	printf '  $ ip -br link | grep -v eth[3-9]\n'
	netdevs | sed 's/^/      /; s/ *$//'
	show ls "/sys/bus/pci/devices/$VF/infiniband"
}

show_pod() {
	title "the pod $*"
	show ip netns exec $POD rdma dev
	show ip netns exec $POD rdma link
	show ip -n $POD -br link
}

on_host() { rdma dev | grep -q ": $1: "; }
in_pod() { ip netns exec $POD rdma dev | grep -q ": $1: "; }
home() { ls "/sys/bus/pci/devices/$VF/$1"; }

# gids lists a pod's GID table as show_gids does: index, type, GID, netdev.
gids() {
	ip netns exec $POD sh -c '
		cd /sys/class/infiniband/mlx5_0/ports/1
		for f in gid_attrs/types/*; do
			type=$(cat "$f" 2>/dev/null) || continue
			i=${f##*/}
			echo "$i  $type  $(cat gids/$i)  $(cat gid_attrs/ndevs/$i)"
		done'
}

# has_gid: the RoCEv2 GID of an IPv4 address is the address mapped to IPv6.
# The kernel fills the table a moment after the address was set.
has_gid() {
	want=$(echo "$1" | awk -F. '{ printf "RoCE v2  0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x", $1, $2, $3, $4 }')
	for _ in $(seq 100); do
		if gids | grep -q "$want"; then return 0; fi
		usleep 20000
	done
	return 1
}

# Programs run from the guest's memory: each page of one in the shared folder
# would cross the 9p link.
mkdir -p $CNI/bin $CNI/net.d /var/log
for program in rdma host-device host-local cnitool; do
	cp /bed/bin/$program $CNI/bin/
done
cat >$CNI/net.d/rail.conflist <<NET
{
  "cniVersion": "1.1.0",
  "name": "rail",
  "plugins": [
    {
      "type": "host-device",
      "pciBusID": "$VF",
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "192.168.7.0/24"}]]
      }
    },
    {
      "type": "rdma",
      "deviceID": "$VF",
      "logFile": "/var/log/rdma.log"
    }
  ]
}
NET

echo "Linux $(uname -r). $VF is a VF of an emulated igb adapter; the RDMA devices on it"
echo "and on its neighbour are simulated. The pod is a network namespace."
rdmasim "add name=mlx5_%d parent=pci:$VF"
rdmasim "add name=mlx5_%d parent=pci:0000:01:10.2"
ip link set eth1 up
ip netns add $POD

title "the node's RDMA mode"
show rdma system
show_host "before ADD"
show_pod "before ADD"
on_host mlx5_0 || fail "mlx5_0 is not on the host to begin with"
netdev=$(home net)
numbers=$(ls /dev/infiniband)

title "the network"
sed 's/^/  /' $CNI/net.d/rail.conflist

title "ADD"
printf '  $ cnitool add rail /run/netns/%s\n' $POD
$CNI/bin/cnitool add rail /run/netns/$POD >/tmp/result || fail "ADD: $(cat /tmp/result)"
if on_host mlx5_0; then fail "mlx5_0 is still on the host"; fi
in_pod mlx5_0 || fail "mlx5_0 is not in the pod"
address=$(ip -n $POD -4 -o addr show dev net1 | awk '{ sub("/.*", "", $4); print $4 }')
has_gid "$address" || fail "the pod's mlx5_0 has no RoCE v2 GID for $address: $(gids)"

show_host "after ADD"
note "mlx5_0 and eth1 are gone, the neighbour's mlx5_1 and eth2 are untouched"
show_pod "after ADD"
show ip -n $POD -br addr show dev net1
printf '  GIDs of mlx5_0 in the pod: index, type, GID, netdev\n'
gids | sed 's/^/      /'
note "one of them is the address $address"

node=/dev/infiniband/$(ls /sys/bus/pci/devices/$VF/infiniband_verbs)
note "$node is its verbs node: the kernel lets only the pod open it"
printf '  $ : <%s\n' "$node"
if sh -c ": <$node" 2>/tmp/shown; then fail "the host can open $node"; fi
sed 's/^.*cannot/      cannot/' /tmp/shown
printf '  $ ip netns exec %s sh -c ": <%s"\n' $POD "$node"
ip netns exec $POD sh -c ": <$node" || fail "the pod cannot open $node"
note "opened"

[ -z "$(home infiniband)" ] || fail "$VF still has an RDMA device on the host"
on_host mlx5_1 || fail "mlx5_1 has left the host"
[ "$(ls /dev/infiniband)" = "$numbers" ] || fail "the character devices are not the same any more"

title "CHECK"
printf '  $ cnitool check rail /run/netns/%s\n' $POD
$CNI/bin/cnitool check rail /run/netns/$POD >/tmp/result || fail "CHECK: $(cat /tmp/result)"
note "succeeded"

title "DEL"
printf '  $ cnitool del rail /run/netns/%s\n' $POD
$CNI/bin/cnitool del rail /run/netns/$POD >/tmp/result || fail "DEL: $(cat /tmp/result)"

show_host "after DEL"
note "mlx5_0 is home, and so is its netdev"
show_pod "after DEL"

on_host mlx5_0 || fail "mlx5_0 is not home"
[ "$(home infiniband)" = mlx5_0 ] || fail "$VF has the RDMA device '$(home infiniband)' instead of mlx5_0"
[ "$(home net)" = "$netdev" ] || fail "$VF has the netdev '$(home net)' instead of $netdev"
if in_pod mlx5_0; then fail "mlx5_0 is still in the pod"; fi
[ "$(ls /dev/infiniband)" = "$numbers" ] || fail "the character devices are not the same any more"
left=$(ls /run/cni/rdma | grep -v '^lock$' || true)
[ -z "$left" ] || fail "a record is left: $left"

title "done: mlx5_0 moved into the pod and came home"
