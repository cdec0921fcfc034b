# Proves in the guest that the bed behaves as a machine with RDMA hardware does.
# Each check prints one line; the exit code is 1 if any of them failed.

VF=0000:01:10.0
VF2=0000:01:10.2
PCI=/sys/bus/pci/devices
failed=0

check() { # DESCRIPTION COMMAND...
	what=$1
	shift
	if "$@" >/tmp/check.out 2>&1; then
		echo "ok    $what"
	else
		failed=$((failed + 1))
		echo "FAIL  $what: $*"
		sed 's/^/      /' /tmp/check.out
	fi
}

sim() { rdmasim "$@"; }
refused() { # ERROR-TEXT COMMAND...
	text=$1
	shift
	if out=$("$@" 2>&1); then
		echo "succeeded"
		return 1
	fi
	case $out in *"$text"*) ;; *) echo "$out" && return 1 ;; esac
}
eventually() { # COMMAND...: within 5 s
	for _ in $(seq 250); do
		"$@" >/dev/null 2>&1 && return 0
		usleep 20000
	done
	"$@"
}
ms() { # COMMAND...: prints how long it took
	t0=$(cut -d' ' -f1 /proc/uptime)
	"$@" || return 1
	t1=$(cut -d' ' -f1 /proc/uptime)
	echo "$t0 $t1" | awk '{ printf "%d\n", ($2 - $1) * 1000 }'
}
at_least() { [ "$1" -ge "$2" ] || { echo "$1 < $2"; return 1; }; }
same() { [ "$1" = "$2" ] || { echo "$1, not $2"; return 1; }; }
not() { ! "$@"; }
empty() { [ -d "$1" ] && [ -z "$(ls "$1")" ] || { ls -la "$1"; return 1; }; }
in_ns() { ns=$1; shift; ip netns exec "$ns" "$@"; }
device_in() { rdma dev | grep -q " $1: "; }
mac() { cat "$PCI/$1/net/"*/address; }
index() { rdma dev show "$1" | cut -d: -f1; }

echo "# the machine"
check "exclusive RDMA mode" grep -q N /sys/module/ib_core/parameters/netns_mode
check "7 VFs of the PF" same "$(ls -d $PCI/0000:01:00.0/virtfn* | wc -l)" 7
check "each VF has its netdev" same "$(ls -d $PCI/0000:01:00.0/virtfn*/net/eth* | wc -l)" 7
check "a VF's address is its administrative one" same "$(mac $VF)" 02:be:d0:00:00:01
check "the shell's ip is iproute2's" ip -V
ip link set eth1 up
check "a VF gets a carrier" eventually grep -q 1 /sys/class/net/eth1/carrier
check "the share can be written" sh -c 'echo x >/bed/selftest && rm /bed/selftest'

echo "# a device on a VF"
check "add" sim "add parent=pci:$VF name=mlx5_%d"
check "below the function" test -d $PCI/$VF/infiniband/mlx5_0
check "char devices" ls /dev/infiniband/uverbs0 /dev/infiniband/umad0 /dev/infiniband/rdma_cm
check "GUID from the netdev's address" same "$(cat $PCI/$VF/infiniband/mlx5_0/node_guid)" 00be:d0ff:fe00:0001
check "port follows its netdev" eventually sh -c 'rdma link show mlx5_0/1 | grep -q "state ACTIVE.*netdev eth1"'
check "rdma_cm attaches: configfs mkdir" mkdir /sys/kernel/config/rdma_cm/mlx5_0
check "TOS can be set" sh -c 'echo 104 >/sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos'
check "no such function" refused "No such device" sim "add parent=pci:0000:7f:00.0"
check "bad key" refused "Invalid argument" sim "add colour=red"
check "a name of ib_core's taken" refused "Too many open files" sim "add name=mlx5_0"

echo "# moves"
ip netns add pod
before=$(index mlx5_0)
check "into a namespace" rdma dev set mlx5_0 netns pod
check "gone from the host" not device_in mlx5_0
check "the function's directory is there and empty" empty $PCI/$VF/infiniband
check "its uverbs entry stays" same "$(cat $PCI/$VF/infiniband_verbs/uverbs0/ibdev)" mlx5_0
check "inside: netlink" in_ns pod rdma dev show mlx5_0
check "inside: sysfs" in_ns pod ls /sys/class/infiniband/mlx5_0/ports/1
check "the index is kept" same "$(in_ns pod rdma dev show mlx5_0 | cut -d: -f1)" "$before"
check "the TOS is reset" same "$(cat /sys/kernel/config/rdma_cm/mlx5_0/ports/1/default_roce_tos)" 0
rmdir /sys/kernel/config/rdma_cm/mlx5_0
ip link set eth1 netns pod
in_ns pod ip link set eth1 up
in_ns pod ip addr add 10.1.2.3/24 dev eth1
check "survives its netdev's move" in_ns pod rdma dev show mlx5_0
check "RoCEv2 GID of the address" eventually in_ns pod sh -c 'cat /sys/class/infiniband/mlx5_0/ports/1/gids/* | grep -q ffff:0a01:0203'
check "GID type" in_ns pod sh -c 'cat /sys/class/infiniband/mlx5_0/ports/1/gid_attrs/types/* 2>/dev/null | grep -q "RoCE v2"'
check "rename inside" in_ns pod rdma dev set mlx5_0 name rdma0
check "dies with its namespace" ip netns del pod
check "returns under the pod's name" eventually device_in rdma0
check "its netdev returns" eventually test -d $PCI/$VF/net/eth1
check "del after a rename" sim del rdma0
check "gone for good" not test -e $PCI/$VF/infiniband

echo "# faults"
ip netns add pod
sim "add parent=pci:$VF2 name=fixed movable=0"
check "not movable" refused "Operation not supported" rdma dev set fixed netns pod
sim del fixed
sim "add parent=pci:$VF2 name=slow"
sim "fault slow remove-delay-ms=300"
took=$(ms rdma dev set slow netns pod)
check "a slow move: $took ms" at_least "$took" 300
check "the delay is used up" grep -q "name=slow .*remove-delay-ms=0" /dev/rdmasim
sim del slow
sim "add parent=pci:$VF2 name=broken"
sim "fault broken enable-errno=12"
check "arrival fails" refused "Cannot allocate memory" rdma dev set broken netns pod
check "but it is there" in_ns pod rdma dev show broken
check "without a uverbs node" not test -e $PCI/$VF2/infiniband_verbs
ip netns del pod
check "netns death repairs it" eventually test -d $PCI/$VF2/infiniband_verbs/uverbs0
check "fault of an unknown device" refused "No such device" sim "fault nobody enable-errno=1"
sim "del *"

echo "# functions that go away"
ip netns add pod
sim "add parent=pci:$VF2 name=plain"
sim "add parent=pci:$VF name=again rebind=1"
old=$(index again)
rdma dev set again netns pod
for vf in $VF $VF2; do echo $vf >$PCI/$vf/driver/unbind; done
check "unbind drops the device" not grep -q name=plain /dev/rdmasim
check "in a pod too" sh -c '! ip netns exec pod rdma dev | grep .'
check "no driver bound" refused "No such device or address" sim "add parent=pci:$VF"
for vf in $VF $VF2; do echo $vf >/sys/bus/pci/drivers_probe; done
check "rebind=1 brings it back, to the host" rdma dev show again
check "with a new index" not same "$(index again)" "$old"
check "plain stays away" not test -e $PCI/$VF2/infiniband
echo 0 >$PCI/0000:01:00.0/sriov_numvfs
check "so does the VFs' removal" not device_in again
sim "del *"
ip netns del pod

echo "# auxiliary devices, ports, links"
took=$(ms sim "add parent=aux:rdmasim.sf.%d name=sf_%d count=48 netdev=1")
check "48 in one command, in $took ms" at_least "$took" 0
check "48 there" same "$(ls -d /sys/bus/auxiliary/devices/rdmasim.sf.*/infiniband/sf_* | wc -l)" 48
check "each has a netdev" same "$(ls -d /sys/bus/auxiliary/devices/rdmasim.sf.*/net/* | wc -l)" 48
check "and a driver" same "$(basename "$(readlink /sys/bus/auxiliary/devices/rdmasim.sf.7/driver)")" rdmasim.sf
ip netns add pod
check "an SF's device moves" rdma dev set sf_7 netns pod
check "its directory is empty" empty /sys/bus/auxiliary/devices/rdmasim.sf.7/infiniband
took=$(ms sim "del *")
check "48 deleted in $took ms, one of them in a pod" same "$(cat /dev/rdmasim)" ""
check "two ports, zero GUID" sim "add name=two ports=2 guid=zero"
check "port 2" rdma link show two/2
check "GUID is zero" same "$(cat /sys/class/infiniband/two/node_guid)" 0000:0000:0000:0000
check "InfiniBand link" sim "add name=ib0 link=ib"
check "its link layer" grep -q InfiniBand /sys/class/infiniband/ib0/ports/1/link_layer
check "it moves" rdma dev set ib0 netns pod
check "all or none: second name taken" refused "Too many open files" sim "add name=x count=2"
check "none" not grep -q name=x /dev/rdmasim

echo "# soft-RoCE of the stock kernel"
modprobe -q crc32_generic # its checksum; part of the kernel since 6.14
modprobe rdma_rxe
ip link add v0 type veth peer name v1
ip link set v0 up
check "a device on a veth" rdma link add rxe0 type rxe netdev v0
case $(uname -r) in
6.*) check "refuses to move" refused "Operation not supported" rdma dev set rxe0 netns pod ;;
*) check "moves" rdma dev set rxe0 netns pod ;;
esac
ip link del v0

echo "# unload"
check "with a device in a pod" rmmod rdmasim
check "no device left" sh -c '! ls /sys/class/infiniband | grep . && ! ip netns exec pod rdma dev | grep .'
check "load again" modprobe rdmasim
check "usable again" sim "add name=last"

[ "$failed" = 0 ] || echo "$failed checks failed"
[ "$failed" = 0 ]
