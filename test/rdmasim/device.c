// SPDX-License-Identifier: GPL-2.0
/* One simulated device, from registration to removal. */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <net/addrconf.h>

#include "rdmasim.h"

static void sim_port_event(struct sim_ib *ib, unsigned int port)
{
	struct ib_event event = { .device = &ib->ibdev, .element.port_num = port };
	struct net_device *ndev = rtnl_dereference(ib->ndev[port - 1]);
	bool up = ndev && netif_running(ndev) && netif_carrier_ok(ndev);

	if (up == ib->active[port - 1])
		return;
	ib->active[port - 1] = up;
	if (!READ_ONCE(ib->registered))
		return;
	event.event = up ? IB_EVENT_PORT_ACTIVE : IB_EVENT_PORT_ERR;
	ib_dispatch_event(&event);
}

/*
 * Follows the netdev of the device's parent as mlx5 does: in every network
 * namespace, and without caring that a move of the netdev looks like its end.
 * Runs under rtnl.
 */
static int sim_netdev_event(struct notifier_block *nb, unsigned long event, void *ptr)
{
	struct sim_ib *ib = container_of(nb, struct sim_ib, nb);
	struct net_device *ndev = netdev_notifier_info_to_dev(ptr);

	if (ndev->dev.parent != ib->ibdev.dev.parent || ndev->dev_port)
		return NOTIFY_DONE;

	switch (event) {
	case NETDEV_REGISTER:
		rcu_assign_pointer(ib->ndev[0], ndev);
		ib_device_set_netdev(&ib->ibdev, ndev, 1);
		break;
	case NETDEV_UNREGISTER:
		if (rtnl_dereference(ib->ndev[0]) != ndev)
			return NOTIFY_DONE;
		RCU_INIT_POINTER(ib->ndev[0], NULL);
		ib_device_set_netdev(&ib->ibdev, NULL, 1);
		break;
	case NETDEV_UP:
	case NETDEV_DOWN:
	case NETDEV_CHANGE:
		break;
	default:
		return NOTIFY_DONE;
	}
	sim_port_event(ib, 1);
	return NOTIFY_DONE;
}

/* EUI-64 of the netdev's address, as RoCE adapters have it; else made from the id. */
static __be64 sim_guid(struct sim_ib *ib, unsigned int id)
{
	struct net_device *ndev;
	u8 eui[8] = { 0x02, 0x72, 0x73, 0xff, 0xfe, id >> 16, id >> 8, id };
	__be64 guid;

	rcu_read_lock();
	ndev = rcu_dereference(ib->ndev[0]);
	if (ndev && ndev->addr_len == ETH_ALEN)
		addrconf_addr_eui48(eui, ndev->dev_addr);
	rcu_read_unlock();
	memcpy(&guid, eui, sizeof(guid));
	return guid;
}

int sim_register(struct sim *sim)
{
	struct sim_ib *ib = ib_alloc_device(sim_ib, ibdev);
	int err;

	if (!ib)
		return -ENOMEM;
	sim_set_ops(&ib->ibdev, sim->spec.movable, sim->spec.anonymous);
	ib->ibdev.node_type = RDMA_NODE_IB_CA;
	ib->ibdev.phys_port_cnt = sim->spec.ports;
	ib->ibdev.num_comp_vectors = num_possible_cpus();
	ib->ibdev.dev.parent = sim->parent;
	strscpy(ib->ibdev.node_desc, "rdmasim", sizeof(ib->ibdev.node_desc));
	ib->ib_link = sim->spec.ib_link;
	ib->pkey = sim->spec.pkey;
	ib->ib_state = IB_PORT_ACTIVE;
	ib->follows_netdev = !sim->spec.ib_link &&
		(sim->spec.parent == SIM_PARENT_PCI || sim->spec.netdev);
	atomic_set(&ib->next_qpn, 0x10);

	if (ib->follows_netdev) {
		ib->nb.notifier_call = sim_netdev_event;
		/* Before ib_core's own notifier, whose GID work asks for the port's netdev. */
		ib->nb.priority = 1;
		/* Reports every existing netdev of every namespace to the new notifier. */
		err = register_netdevice_notifier(&ib->nb);
		if (err)
			goto dealloc;
	}
	ib->guid = sim->spec.zero_guid ? 0 : sim_guid(ib, sim->id);
	ib->ibdev.node_guid = ib->guid;

	/* No DMA device: addresses stay virtual, nothing is mapped. */
	err = ib_register_device(&ib->ibdev, sim->spec.name, NULL);
	if (err)
		goto notifier;
	if (sim->spec.tc) {
		err = sim_tc_add(ib);
		if (err)
			goto unregister;
	}
	WRITE_ONCE(ib->registered, true);
	sim->ib = ib;
	return 0;

unregister:
	ib_unregister_device(&ib->ibdev);

notifier:
	if (ib->follows_netdev)
		unregister_netdevice_notifier(&ib->nb);
dealloc:
	ib_dealloc_device(&ib->ibdev);
	return err;
}

void sim_unregister(struct sim *sim)
{
	struct sim_ib *ib = sim->ib;

	if (!ib)
		return;
	sim->ib = NULL;
	WRITE_ONCE(ib->registered, false);
	if (ib->follows_netdev)
		unregister_netdevice_notifier(&ib->nb);
	if (ib->tc)
		sim_tc_remove(ib);
	ib_unregister_device(&ib->ibdev);
	ib_dealloc_device(&ib->ibdev);
}

/*
 * An ib_client of our own: ib_core waits for its remove in each move, which
 * makes a move as slow as real firmware can be.
 */
static int sim_client_add(struct ib_device *ibdev)
{
	return ibdev->ops.owner == THIS_MODULE ? 0 : -EOPNOTSUPP;
}

static void sim_client_remove(struct ib_device *ibdev, void *data)
{
	unsigned int ms = atomic_xchg(&to_sim_ib(ibdev)->remove_delay_ms, 0);

	if (ms)
		msleep(ms);
}

static struct ib_client sim_client = {
	.name = "rdmasim",
	.add = sim_client_add,
	.remove = sim_client_remove,
	.no_kverbs_req = 1,
};

int sim_client_init(void)
{
	return ib_register_client(&sim_client);
}

void sim_client_exit(void)
{
	ib_unregister_client(&sim_client);
}
